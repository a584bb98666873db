"""Checkpoints of models, optimizers and tensors: saved whole, or a named error."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plain import enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import multiring.torch as mt
from multiring._frontend.checkpoint.framework import Framework
from multiring.errors import ArgumentError, MismatchError

DTYPES = sorted(
    {
        each
        for name in dir(torch)
        if isinstance(each := getattr(torch, name), torch.dtype) and not str(each).startswith(("torch.q", "torch.bits"))
    }
    - {getattr(torch, f"{kind}int{bits}", None) for kind in ("", "u") for bits in range(1, 8)},
    key=str,
)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of type `dtype` with random bits, in several layouts."""
    torch.manual_seed(1)
    found = []
    for shape in ((), (0,), (1,), (4, 6), (2, 0, 3)):
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
        found.append(bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype))
    wide = found[3]
    found += [wide.t(), wide[1:, ::2], wide[:1, :1], wide[0].expand(3, 6)]
    if dtype.is_complex and dtype is not torch.complex32:
        found += [wide.conj(), wide.conj().imag, wide[:1, 0].imag, wide.real]
    return found


def bits_of(tensor: Tensor) -> Any:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist() if plain.numel() else []
    return tensor.dtype, tuple(tensor.shape), bits


def keep_all_types(_here: Here, folder: str) -> None:
    enter()
    warnings.simplefilter("ignore", UserWarning)  # torch warns about types that it may remove
    wanted = {str(dtype): tensors(dtype) for dtype in DTYPES}
    assert {"torch.float8_e8m0fnu", "torch.uint16", "torch.complex128", "torch.bool"} <= set(wanted)
    mt.save(f"{folder}/c", x=wanted, size=torch.Size([2, 3]), device=torch.device("cpu"), dtype=torch.bfloat16)
    found = mt.load(f"{folder}/c")
    for name, each in wanted.items():
        assert list(map(bits_of, found["x"][name])) == list(map(bits_of, each)), name
    assert (found["size"], found["device"], found["dtype"]) == ((2, 3), torch.device("cpu"), torch.bfloat16)
    assert isinstance(found["size"], torch.Size)


class Subclass(Tensor):
    """A subclass of Tensor."""


def refuse(_here: Here, folder: str) -> None:
    enter()
    warnings.simplefilter("ignore", UserWarning)  # torch warns about types that it may remove
    path = f"{folder}/c"
    mt.save(path, good=torch.ones(2))
    lazy = nn.LazyLinear(3)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    cases: dict[str, Any] = {
        r"x\.a is sparse_coo: save its indices and values": {"a": torch.eye(3).to_sparse()},
        r"x\.a is sparse_csr: save": {"a": torch.eye(3).to_sparse_csr()},
        r"x\.a is quantized: save value.int_repr": {"a": quantized},
        r"x\.0 is a nested tensor: save its tensors": [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])],
        r"x\.0 is a NestedTensor, a subclass of Tensor": [
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        ],
        r"x is on meta and has no values": torch.empty(2, device="meta"),
        r"x is a Subclass, a subclass of Tensor": torch.ones(2).as_subclass(Subclass),
        r"x\.weight has no shape yet": lazy,
        r"x has an array among its keys": {torch.ones(1): 1},
    }
    for text, value in cases.items():
        with pytest.raises(ArgumentError, match=text):
            mt.save(path, x=value)
        assert torch.equal(mt.load(path)["good"], torch.ones(2))

    def inside(x: Tensor) -> Tensor:
        mt.save(path, x=x)
        return x

    with pytest.raises(ArgumentError, match="x is a tensor inside a transformation such as vmap"):
        torch.vmap(inside)(torch.ones(2))
    for odd in ("", " ", "a\0b"):
        with pytest.raises(ArgumentError, match="want the path of a folder"):
            mt.save(odd, x=1)


def say_what_is_left(_here: Here, folder: str) -> None:
    enter()
    path, model = f"{folder}/c", nn.Linear(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Framework, "random_state", lambda _: {"python": [1]})
        mt.save(path, model=model)
    with pytest.raises(
        ArgumentError, match=r"states of random number generators do not fit this version .*randomness=False"
    ):
        mt.load(path, model=model)
    mt.load(path, model=model, randomness=False)
    (file,) = Path(path).rglob("shared.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(
        ArgumentError, match=r"is damaged: .*overwritten the arrays of `parts`: load another checkpoint"
    ):
        mt.load(path, model=model)
    with pytest.raises(ArgumentError, match=r"is damaged: its arrays are not those that were saved$"):
        mt.load(path)


class Kept(nn.Module):
    """A module with everything that a module may have besides parameters."""

    _version = 3
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None, persistent=False)
        self.count: Any = None
        self.loaded_version: Any = None

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        self.loaded_version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *more)


def keep_what_belongs_to_a_module(here: Here, folder: str) -> None:
    enter()
    path = f"{folder}/c"
    for extra in ({"seen": 3, "by": torch.arange(3, device="cpu")}, b"bytes", None, (1, "a")):
        model = Kept()
        model.count = extra
        model.mean = model.mean + 1 + here.rank
        mt.save(path, model=nn.ModuleDict({"a": model}))
        again = Kept()
        mt.load(path, model=nn.ModuleDict({"a": again}))
        assert str(again.count) == str(extra)
        assert again.mean.tolist() == [1.0 + here.rank] * 2  # like BatchNorm's statistics, each rank has its own
        assert again.loaded_version == 3
    model.count = object()
    kind = ArgumentError if here.rank == 0 else MismatchError
    with pytest.raises(kind, match=r"model\.a\._extra_state is a object; want"):
        mt.save(path, model=nn.ModuleDict({"a": model}))
    keep_modules_named_as_wrappers_are(here, path)
    keep_rates_apart(path)
    refuse_paths_on_every_rank(here, folder)


class Scaled(nn.Module):
    """A module with a scale, and perhaps an inner module.

    The inner module is called `module`, as in DistributedDataParallel.
    """

    scale: Tensor

    def __init__(self, inner: nn.Module | None, *, persistent: bool) -> None:
        super().__init__()
        self.module = inner
        self.register_buffer("scale", torch.zeros(1), persistent=persistent)


def keep_modules_named_as_wrappers_are(here: Here, path: str) -> None:
    for outer, inner in ((True, True), (True, False), (False, True), (False, False)):
        model, again = (Scaled(Scaled(None, persistent=inner), persistent=outer) for _ in range(2))
        for number, each in enumerate(model.buffers()):
            each.fill_(10 * number + here.rank + 1)
        mt.save(path, model=model)
        mt.load(path, model=again)
        assert list(again.buffers()) == list(model.buffers()), (outer, inner)


def keep_rates_apart(path: str) -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]

    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [each]} for each in weights], lr=torch.tensor(0.5))

    optimizer, again = made(), made()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    mt.save(path, optimizer=optimizer)
    mt.load(path, optimizer=again)  # its groups share one tensor
    assert [float(group["lr"]) for group in again.param_groups] == [0.25, 0.5]


def refuse_paths_on_every_rank(here: Here, folder: str) -> None:
    long: Any = f"{folder}/{'x' * 300}"
    for call in (mt.is_saved, mt.load):
        with pytest.raises((ArgumentError, MismatchError), match="cannot be accessed: File name too long"):
            call(long)
    path: Any = None if here.rank else f"{folder}/c"
    with pytest.raises(ArgumentError if here.rank else MismatchError, match="is_saved: path None: want the path"):
        mt.is_saved(path)


def say_whether_there_is_one(here: Here, folder: str) -> None:
    """False means that a program starts anew and replaces what is there: only where nothing can be resumed."""
    begin(here, folder)
    place = Path(folder) / str(here.rank)  # a disk of its own for each rank
    place.mkdir()
    os.chdir(place)
    assert not mt.is_saved("last")
    mt.save(f"{folder}/shared", value=here.size)
    shutil.copytree(f"{folder}/shared", "last")
    assert mt.is_saved("last")
    whole, other = Path("last/manifest.json").read_bytes(), ArgumentError if here.rank == 0 else MismatchError
    for damage in (whole[: len(whole) // 2], whole.replace(b'"format": 2', b'"format": 99')):
        Path("last/manifest.json").write_bytes(damage)
        with pytest.raises(other, match=r"manifest.json cannot be read|saved by a newer version"):
            mt.is_saved("last")
    Path("last/manifest.json").write_bytes(whole)
    mt.barrier()
    if here.rank == 0:
        Path("last").rename("moved")
        Path("file").touch()
    with pytest.raises(ArgumentError, match="rank 0 finds no checkpoint, but there is one for rank 1: copy it"):
        mt.is_saved("last")
    with pytest.raises(other, match="file is a file, and a checkpoint of multiring is a folder"):
        mt.is_saved("file")
    if here.rank == 0:
        Path("moved").rename("last")
        for each in Path("last").glob("data-*"):
            each.rename("elsewhere")
    with pytest.raises(other, match=r"is damaged: its data folder data-.* is missing"):
        mt.is_saved("last")


def test_a_checkpoint_that_cannot_be_loaded_is_not_taken_for_none(tmp_path: Path) -> None:
    run_ranks(say_whether_there_is_one, 2, str(tmp_path))


def refuse_to_round(_here: Here, folder: str) -> None:
    enter()
    path = f"{folder}/c"
    mt.save(path, model=nn.Linear(2, 2), half=nn.Linear(2, 2).bfloat16())
    with pytest.raises(
        ArgumentError, match=r"model\.weight is float32 in the checkpoint, but bfloat16 in this model, which would"
    ):
        mt.load(path, model=nn.Linear(2, 2).bfloat16())
    wide = nn.Linear(2, 2)
    mt.load(path, half=wide)
    assert torch.equal(wide.weight, mt.load(path)["half"]["weight"].float())


def jobs(here: Here, folder: str) -> None:
    keep_all_types(here, folder)
    refuse(here, folder)
    refuse_to_round(here, folder)
    say_what_is_left(here, folder)


def test_types_come_back_or_are_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    run_ranks(jobs, 1, str(tmp_path))


def test_what_belongs_to_a_module_is_kept(tmp_path: Path) -> None:
    run_ranks(keep_what_belongs_to_a_module, 2, str(tmp_path))


def begin(here: Here, folder: str) -> None:
    method = f"file://{folder}/store"
    torch.distributed.init_process_group("multiring", init_method=method, rank=here.rank, world_size=here.size)
    mt.init()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def compiled_inside(model: nn.Sequential) -> nn.Module:
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[assignment]
    return model


def wrap_in_all_ways(here: Here, folder: str) -> None:
    begin(here, folder)
    wraps: dict[str, Any] = {
        "plain": lambda model: model,
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "ddp": nn.parallel.DistributedDataParallel,
        "compiled ddp": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
        "ddp of compiled": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")),
        "compiled inside": compiled_inside,
        "activations": lambda model: nn.Sequential(*map(checkpoint_wrapper, model)),
    }
    path = f"{folder}/c"
    torch.manual_seed(0)
    for saver in wraps.values():
        model = network()
        model[1].running_mean.fill_(here.rank)  # type: ignore[operator]
        saved = saver(model)  # DDP gives all ranks rank 0's statistics
        wanted = [each.clone() for each in saved.state_dict().values()]
        mt.save(path, model=saved)
        for loader in wraps.values():
            again = network()
            mt.load(path, model=loader(again))
            assert all(map(torch.equal, again.state_dict().values(), wanted))
    with pytest.raises(ArgumentError, match=r"another model's: model\..*weight is not in the checkpoint"):
        mt.load(path, model=nn.Sequential(network(), nn.Linear(2, 2)))
    torch.distributed.destroy_process_group()


def test_wrapped_and_plain_models_load_each_others_checkpoints(tmp_path: Path) -> None:
    run_ranks(wrap_in_all_ways, 2, str(tmp_path))


def divide(here: Here, folder: str) -> None:
    begin(here, folder)
    sample, targets = torch.randn(16, 8), torch.randn(16, 4)

    def made(seed: int, mesh: str) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
        model = mt.parallelize(net, sample, {mesh: 2})
        return model, torch.optim.Adam(model.parameters())

    def whole(tensor: Any) -> Tensor:
        found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return found

    for mesh in ("shard", "tensor"):
        model, optimizer = made(0, mesh)
        model.step(*model.share(sample, targets), nn.functional.mse_loss)
        optimizer.step()
        mt.save(f"{folder}/{mesh}", model=model.module, optimizer=optimizer)
        again, other = made(1, mesh)
        mt.load(f"{folder}/{mesh}", model=again.module, optimizer=other)
        for (name, wanted), found in zip(
            model.module.state_dict().items(), again.module.state_dict().values(), strict=True
        ):
            assert type(found) is type(wanted)
            assert torch.equal(whole(found), whole(wanted)), name
        for number, kept in optimizer.state_dict()["state"].items():
            for key, value in kept.items():
                assert torch.equal(whole(other.state_dict()["state"][number][key]), whole(value)), key
        plain = mt.load(f"{folder}/{mesh}")["model"]
        assert all(torch.equal(plain[name], whole(each)) for name, each in model.module.state_dict().items())
        other.step()
    torch.distributed.destroy_process_group()


def test_what_lies_on_several_ranks_is_saved_whole(tmp_path: Path) -> None:
    run_ranks(divide, 2, str(tmp_path))


def lay_out_as_before(_here: Here, folder: str) -> None:
    enter()

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Conv2d(4, 6, 3)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch has no type for it
        model.register_parameter("turned", nn.Parameter(torch.randn(3, 5).t()))
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made(0)
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()
    mt.save(f"{folder}/c", model=model, optimizer=optimizer)
    again, other = made(1)
    mt.load(f"{folder}/c", model=again, optimizer=other)
    for parameter, kept in zip(again.parameters(), other.state_dict()["state"].values(), strict=True):
        wanted = optimizer.state[dict(zip(again.parameters(), model.parameters(), strict=True))[parameter]]
        assert torch.equal(kept["exp_avg"], wanted["exp_avg"])
        assert kept["exp_avg"].stride() == wanted["exp_avg"].stride() == parameter.stride()


def test_an_optimizers_state_lies_in_memory_as_it_did(tmp_path: Path) -> None:
    run_ranks(lay_out_as_before, 1, str(tmp_path))


MEMORY = """
import sys, torch
import multiring.torch as mt

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10

mt.init()
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 1024, bias=False) for _ in range(4)))  # 64 MiB
turned = torch.nn.Parameter(torch.randn(4096, 2048).t())  # 32 MiB, not in row order
model.register_parameter("turned", turned)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
for each in model.parameters():
    each.grad = torch.zeros_like(each)
optimizer.step()
mt.save(sys.argv[1], small=torch.nn.Linear(2, 2), turned=torch.randn(2048, 1024).t())
mt.load(sys.argv[1])
before = peak()
mt.save(sys.argv[1], model=model, optimizer=optimizer)
saved = peak()
mt.load(sys.argv[1], model=model, optimizer=optimizer)
print(saved - before, peak() - saved)
"""


def test_memory_beside_what_is_saved_and_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "c")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    saving, loading = map(int, done.stdout.split())
    assert saving <= 32
    assert loading <= 32
