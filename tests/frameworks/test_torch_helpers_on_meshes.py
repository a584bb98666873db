"""Every helper of docs/loop.md and docs/convergence.md under every mesh: one process' result, or a refusal by name."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frameworks.plain import backward, join
from tests.wire.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring.errors import ArgumentError, UnsupportedError
from multiring.optim import Cosine
from multiring.torch.parallelizing.deciding import Prospect, build, look

AXES = ("data", "shard", "tensor", "pipeline")
LOSS = nn.functional.mse_loss
PAGE = Path(__file__).parents[2] / "docs" / "loop.md"
SAME, REFUSED = "same", "refused"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator).double(), torch.randn(8, 4, generator=generator).double())
        for _ in range(count)
    ]


@cache
def prospect() -> Prospect:
    """Return what was measured of the network, once for all meshes."""
    return look(network(), (batches()[0][0],), None, 1, None)


class Training:
    """A model, its parameters, and a step of it, on many ranks or on one."""

    def __init__(self, mesh: dict[str, int] | None) -> None:
        self.parallel = None if mesh is None else build(network(), prospect().taken(mesh), prospect())
        self.module: nn.Module = network() if self.parallel is None else self.parallel.module

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=0.1, momentum=0.5)

    def backward(self, inputs: Tensor, targets: Tensor, loss: Any = LOSS) -> Tensor:
        if self.parallel is not None:
            own, labels = self.parallel.share(inputs, targets)
            found: Tensor = self.parallel.step(own, labels, loss)
            return found
        made: Tensor = loss(self.module(inputs), targets)
        backward(made)
        return made.detach()

    def train(self, *optimizers: torch.optim.Optimizer) -> None:
        for inputs, targets in batches():
            self.backward(inputs, targets)
            for each in optimizers:
                each.step()
                each.zero_grad()


def accumulated(here: Training) -> None:
    optimizer = here.sgd()
    group = mt.accumulate(optimizer, 2)
    for inputs, targets in batches():
        with group as completes:
            here.backward(inputs, targets, lambda made, labels: LOSS(made, labels) / 2)
            if completes:
                nn.utils.clip_grad_norm_(here.parameters, 0.05)
            optimizer.step()
            optimizer.zero_grad()


def uneven(here: Training) -> None:
    optimizer = here.sgd()
    for inputs, targets in batches():
        here.backward(inputs[:7], targets[:7])
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_torch(here: Training) -> None:
    optimizer = here.sgd()
    for inputs, targets in batches():
        here.backward(inputs, targets)
        nn.utils.clip_grad_norm_(here.parameters, 0.05)
        optimizer.step()
        optimizer.zero_grad()


def with_stage(attach: Callable[[Training, torch.optim.Optimizer], Any]) -> Callable[[Training], None]:
    def loop(here: Training) -> None:
        optimizer = here.sgd()
        attached = attach(here, optimizer)
        here.train(optimizer)
        if hasattr(attached, "flush"):
            attached.flush()
        if hasattr(attached, "applied"):
            attached.applied().__enter__()

    return loop


def scaled_by_torch(here: Training) -> None:
    optimizer, scaler = here.sgd(), torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, (inputs, targets) in enumerate(batches()):
        factor = float("inf") if number == 1 else 1.0
        scaler.scale(torch.zeros(()))  # where the loss is another stage's, too
        here.backward(inputs, targets, lambda made, labels, f=factor: scaler.scale(LOSS(made, labels) * f))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(here.parameters, 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def measured(here: Training) -> None:
    optimizer = here.sgd()
    noise = mt.noise_scale(optimizer, every=1, warns=False)
    for first, second in zip(batches()[::2], batches()[1::2], strict=True):
        for inputs, targets in (first, second):
            here.backward(inputs, targets, lambda made, labels: LOSS(made, labels) / 2)
            noise.part(len(inputs))
        optimizer.step()
        optimizer.zero_grad()
    here.module.register_buffer("noise", torch.tensor([noise.value, noise.batch], dtype=torch.float64))


def reloaded(here: Training) -> None:
    """Save after half of the steps, and go on with what was saved."""
    optimizer = torch.optim.Adam(here.parameters, lr=0.01)
    here.train(optimizer)
    if here.parallel is None:
        here.train(optimizer)
        return
    folder = [Path(FOLDER[0]) / "-".join(map(str, here.parallel.parallelism.axes))]
    mt.save(folder[0], model=here.module, optimizer=optimizer)
    axis, size = here.parallel.parallelism.axes[0]
    again = Training({axis.value: size})
    with torch.no_grad():
        for each in again.parameters:
            each.zero_()
    second = torch.optim.Adam(again.parameters, lr=0.01)
    mt.load(folder[0], model=again.module, optimizer=second)
    here.parallel, here.module = again.parallel, again.module
    again.train(second)


def distributed(here: Training) -> None:
    optimizer = here.sgd()
    if here.parallel is not None:
        with pytest.raises(ArgumentError, match="parallelize"):
            mt.DistributedOptimizer(optimizer, here.module.named_parameters())
        mt.distribute(here.module, optimizer, DataLoader(TensorDataset(*batches()[0]), batch_size=8))


def reported(here: Training) -> None:
    if here.parallel is not None:
        mt.training_report(
            here.module, lambda plain: plain(batches()[0][0]).sum(), samples=8, measure=lambda: {"m": 1e9}
        )


FOLDER = [""]


def scaled(here: Training, optimizer: torch.optim.Optimizer) -> None:
    if here.parallel is not None:
        mt.mixed_precision(optimizer, "fp16")


HELPERS: dict[str, Callable[[Training], None]] = {
    "`accumulate`, with `clip_grad_norm_`": accumulated,
    "a batch that ranks cannot divide": uneven,
    "`torch.nn.utils.clip_grad_norm_`": clipped_by_torch,
    "`torch.amp.GradScaler`, with an overflow": scaled_by_torch,
    "two optimizers": lambda here: here.train(
        torch.optim.SGD([each for each in here.parameters if each.dim() > 1], lr=0.1),
        torch.optim.Adam([each for each in here.parameters if each.dim() == 1], lr=0.01),
    ),
    "`clip_gradients`": with_stage(lambda _here, optimizer: mt.clip_gradients(optimizer, 0.05)),
    "`gradient_lag`": with_stage(lambda _here, optimizer: mt.gradient_lag(optimizer)),
    "`moving_average`": with_stage(lambda here, optimizer: mt.moving_average(optimizer, here.module, 0.5)),
    "`schedule`": with_stage(lambda _here, optimizer: mt.schedule(optimizer, Cosine(10))),
    '`mixed_precision("bf16")`': with_stage(lambda _here, optimizer: mt.mixed_precision(optimizer, "bf16")),
    '`mixed_precision("fp16")`': with_stage(scaled),
    "`noise_scale`, with `part`": measured,
    "`LARS`": lambda here: here.train(mt.LARS(here.parameters, lr=1.0, weight_decay=0.01)),
    "`LAMB`": lambda here: here.train(mt.LAMB(here.parameters, lr=0.01)),
    "`LARC`": lambda here: here.train(mt.LARC(here.sgd())),
    "`Muon`, with AdamW": lambda here: here.train(
        mt.Muon([each for each in here.parameters if each.dim() > 1], lr=0.01),
        torch.optim.AdamW([each for each in here.parameters if each.dim() == 1], lr=0.01),
    ),
    "`save` and `load`": reloaded,
    "`distribute`, `DistributedOptimizer`": distributed,
    "`training_report`": reported,
}


def cell(helper: Callable[[Training], None], axis: str) -> str:
    one = Training(None)
    helper(one) if helper is not uneven else None
    parallel = Training({axis: dist.get_world_size()})
    try:
        helper(parallel)
    except (ArgumentError, UnsupportedError):
        return REFUSED
    truth = {**dict(one.module.named_parameters()), **dict(one.module.named_buffers())}
    module = getattr(parallel.module, "module", parallel.module)
    assert parallel.parallel is not None
    if helper is uneven:  # of a tensor axis all ranks have all samples
        helper(one)
    for name, each in (*module.named_parameters(), *module.named_buffers(), *parallel.module.named_buffers()):
        found, want = getattr(each, "full_tensor", lambda each=each: each)().detach(), truth[name].detach()
        if not torch.allclose(found, want, rtol=1e-6, atol=1e-9):
            return f"WRONG: {name} is off by {float((found - want).abs().max()):.1e}"
    return SAME


def try_all(here: Here, folder: str) -> dict[str, dict[str, str]]:
    torch.set_num_threads(1)
    join(here)
    FOLDER[0] = folder
    dist.init_process_group("multiring", init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)
    found = {name: {axis: cell(helper, axis) for axis in AXES} for name, helper in HELPERS.items()}
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(300)
def test_helpers_on_meshes(tmp_path: Path) -> None:
    ranks = run_ranks(try_all, 2, str(tmp_path), deadline_s=240.0)
    assert ranks[0] == ranks[1]
    told = {name: tuple(cells[axis] for axis in AXES) for name, cells in ranks[0].items()}
    rows = re.findall(r"^\| (.+?) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert told == {name: tuple(cells) for name, *cells in rows if name in HELPERS}
