"""DDP with multiring's communication hook: arena buckets, wire types, residuals."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.lossy import expect_same_bits
from tests.support.plain import average_, backward, join, loss_of, mean_gradients, network
from tests.support.processes import in_arena, process_group
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt
from multiring.errors import ArgumentError

RATE = 0.1
# Bounds relative to a gradient's largest element: float32's rounding, and the wire type's loss once for each rank.
BOUNDS = {"none": 1e-5, "fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2}


def small() -> nn.Module:
    """Return a network with some parameters in the channels_last memory format."""
    made = network(torch.float32)
    made.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch has no stub for it
    return made


def hooked(model: nn.Module, sharing: mt.BucketSharing, *, view: bool = True, **options: Any) -> Any:
    """Return `model` as DDP with the hook, in several buckets of a few hundred bytes."""
    made = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=3e-4, **options)
    made.register_comm_hook(sharing, mt.allreduce_hook)
    return made


def step_of(here: Here, model: nn.Module, step: int) -> None:
    backward(loss_of(model, 10 * step + here.rank))


def means_of(here: Here, model: nn.Module, step: int) -> list[Tensor]:
    losses = [lambda model, rank=rank: loss_of(model, 10 * step + rank) for rank in range(here.size)]
    return mean_gradients(lambda: copy.deepcopy(model), losses)


# ---- in place ----


def test_gradients_are_made_and_averaged_in_the_arena(tmp_path: Path) -> None:
    run_ranks(average, 2, tmp_path / "store")


def average(here: Here, store: Path) -> None:
    """Average in the arena, in whatever way gradients are reset.

    With view=False, DDP copies gradients into and out of its buckets.
    """
    with process_group(here, store) as group:
        for view, options in ((True, {}), (True, {"static_graph": True}), (False, {})):
            model = hooked(small(), mt.BucketSharing(), view=view, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
            wanted = small()
            for step in range(4):
                optimizer.zero_grad(set_to_none=step != 2)
                step_of(here, model, step)
                expect_close(model, means_of(here, wanted, step), "none")
                assert all(in_arena(each) == view for each in gradients(model))
                optimizer.step()
                wanted.load_state_dict(model.module.state_dict())
                expect_same_bits(group, list(model.parameters()))


@pytest.mark.parametrize(("ranks", "engine"), [(2, "tcp"), (3, "shm+tcp")])
def test_wire_types_between_hosts(tmp_path: Path, ranks: int, engine: str) -> None:
    run_ranks(code, ranks, tmp_path / "store", engine=engine)


def code(here: Here, store: Path) -> None:
    with process_group(here, store) as group:
        for name, bound in BOUNDS.items():
            for feedback in (False, True):
                if feedback and name == "none":
                    continue
                sharing = mt.BucketSharing(getattr(mt.Compression, name), error_feedback=feedback)
                model = hooked(small(), sharing, view=not feedback)
                for step in range(3):
                    model.zero_grad()
                    step_of(here, model, step)
                    # The residual of the previous step may be as large as this step's rounding loss.
                    expect_close(model, means_of(here, small(), step), name, 2.0 if feedback else 1.0)
                    expect_same_bits(group, gradients(model))
                if name == "bf16" and not feedback:
                    wanted = means_of(here, small(), 2)
                    pairs = zip(gradients(model), wanted, strict=True)
                    assert not all(torch.allclose(one, other, rtol=0, atol=1e-7) for one, other in pairs)
                assert bound > 0


def test_unused_parameters_and_ranks_that_ran_out(tmp_path: Path) -> None:
    run_ranks(leave_out, 2, tmp_path / "store")


class Forks(nn.Module):
    """Three layers: each forward pass uses one of the first two, and none the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        found: Tensor = self.layers[chosen](x)
        return found


def leave_out(here: Here, store: Path) -> None:
    with process_group(here, store) as group:
        for sharing in (mt.BucketSharing(), mt.BucketSharing(mt.Compression.int8, error_feedback=True)):
            model = hooked(Forks(), sharing, find_unused_parameters=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            with model.join():
                for step in range(2 + here.rank):
                    optimizer.zero_grad()
                    x = torch.full((1, 3), float(1 + step))
                    backward(model(x, (here.rank + step) % 2).sum())
                    if step < 2:  # both ranks have samples, and each layer is used by one rank
                        for layer in model.module.layers[:2]:
                            wanted = torch.full((2, 3), 0.5 * (1 + step))
                            assert torch.allclose(layer.weight.grad, wanted, atol=0.05 * (1 + step))
                    assert all(each.grad is None for each in model.module.layers[2].parameters())
                    optimizer.step()
            expect_same_bits(group, list(model.parameters()))


# ---- losses and residuals ----


class Weights(nn.Module):
    """Two matrices and a vector; each gradient equals the tensor passed for it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(12, 20))
        self.deep = nn.Parameter(torch.zeros(16, 10))
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, given: Sequence[Tensor]) -> Tensor:
        parts = [(each * value).sum() for each, value in zip(self.parameters(), given, strict=True)]
        return torch.stack(parts).sum()


def given_to(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(each.shape, generator=generator) for each in Weights().parameters()]


# No residual holds the rounding of the ranks' sums: up to 2^-9 of an element in each of five steps.
NOT_OWED = {"powersgd": 1e-4, "bf16": 0.05}
LOSSY = {
    "powersgd": lambda: mt.BucketSharing(mt.PowerSGD(2)),
    # int8 is missing because it quantizes blocks of elements, and blocks depend on the buckets.
    "bf16": lambda: mt.BucketSharing(mt.Compression.bf16, error_feedback=True),
}


@pytest.mark.parametrize("name", LOSSY)
def test_nothing_is_lost_for_good_and_states_resume_to_the_bit(tmp_path: Path, name: str) -> None:
    run_ranks(conserve, 2, tmp_path / "store", name, engine="tcp")


def conserve(here: Here, store: Path, name: str) -> None:
    """The applied gradients plus all residuals equal the sum of all gradients.

    A saved state resumes with other buckets.
    """
    with process_group(here, store) as group:
        sharing = LOSSY[name]()
        model = hooked(Weights(), sharing)
        handed = [torch.zeros_like(each) for each in model.parameters()]
        applied = [torch.zeros_like(each) for each in model.parameters()]
        for step in range(5):
            run(model, here, step, applied)
            for total, given in zip(handed, given_to(here.rank, step), strict=True):
                total.add_(given)
        state = copy.deepcopy(sharing.state_dict(model.module))
        owed = [state["residuals"].get(index, torch.zeros_like(each)) for index, each in enumerate(handed)]
        lost = 0.0
        for total, rest, found in zip(handed, owed, applied, strict=True):
            for each in (total, rest):
                average_(group, each)
            lost += float((found - total).abs().max())
            assert torch.allclose(found + rest, total, rtol=0, atol=NOT_OWED[name])
        assert lost > 1e-3  # a rounding loss that the residuals compensate
        saved = copy.deepcopy(sharing.state_dict(model.module))
        again = LOSSY[name]()
        other = hooked(Weights(), again, static_graph=True)
        again.load_state_dict(saved, other.module)
        for step in range(5, 8):
            run(model, here, step)
            run(other, here, step)
            for one, two in zip(gradients(model), gradients(other), strict=True):
                assert torch.equal(one, two)


def run(model: nn.Module, here: Here, step: int, applied: Sequence[Tensor] = ()) -> None:
    model.zero_grad()
    backward(model(given_to(here.rank, step)))
    for total, gradient in zip(applied, gradients(model), strict=False):
        total.add_(gradient)


# ---- bad input ----


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    run_ranks(refuse, 1, tmp_path / "store")


def refuse(here: Here, store: Path) -> None:
    with pytest.raises(ArgumentError, match="error_feedback=True without a wire type"):
        mt.BucketSharing(error_feedback=True)
    join(here)
    made = dist.FileStore(str(store), here.size)  # type: ignore[attr-defined] # torch defines it
    dist.init_process_group("gloo", store=made, rank=here.rank, world_size=here.size)
    with pytest.raises(ArgumentError, match=r"want a group of multiring, made by init_process_group\('multiring'\)"):
        _ = mt.BucketSharing().group
    dist.destroy_process_group()


def test_ranks_that_ask_for_different_things(tmp_path: Path) -> None:
    run_ranks(differ, 2, tmp_path / "store", engine="tcp")


def differ(here: Here, store: Path) -> None:
    with process_group(here, store):
        compression = mt.Compression.bf16 if here.rank else mt.Compression.int8
        model = hooked(small(), mt.BucketSharing(compression))
        with pytest.raises(RuntimeError, match="the ranks do not agree"):
            step_of(here, model, 0)
        double = DistributedDataParallel(network(torch.float64))
        double.register_comm_hook(mt.BucketSharing(mt.PowerSGD(1)), mt.allreduce_hook)
        with pytest.raises(Exception, match="takes float32 gradients only"):
            step_of(here, double, 0)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [each.grad for each in model.parameters()]
    return [each for each in found if each is not None]


def expect_close(model: nn.Module, wanted: Sequence[Tensor], name: str, factor: float = 1.0) -> None:
    for gradient, mean in zip(gradients(model), wanted, strict=True):
        bound = factor * BOUNDS[name] * max(1.0, float(mean.abs().max()))
        assert torch.allclose(gradient, mean, rtol=0, atol=bound)
