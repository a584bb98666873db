"""Today's torch programs on two ranks follow one process with the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.plain import CLASSES, backward, join, network, samples
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt

RANKS, STEPS, BATCH = 2, 6, 24


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's part of a training.

    With `size` 1 it is the whole training, with a plain optimizer.
    """

    model: Any
    optimizer: Any
    rank: int
    size: int
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", init_scale=256.0))

    def loss(self, step: int, count: int = BATCH, part: slice = slice(None)) -> Tensor:
        """Return the mean loss on this rank's share of a batch, or of a part of it."""
        images, labels = samples(step, count, torch.float32)
        images, labels = images[part][self.rank :: self.size], labels[part][self.rank :: self.size]
        return nn.functional.cross_entropy(self.model(images), labels)

    def rewrapped(self, **options: Any) -> None:
        """Make the DistributedOptimizer again, if there are several ranks."""
        if self.size > 1:
            mt.DistributedOptimizer(self.optimizer, self.model.named_parameters(), **options)


# ---- ways to take a step ----


def plainly(task: Task, step: int) -> None:
    task.optimizer.zero_grad()
    backward(task.loss(step))
    task.optimizer.step()


def keeping_gradients(task: Task, step: int) -> None:
    task.optimizer.zero_grad(set_to_none=False)
    backward(task.loss(step))
    task.optimizer.step()


def clipping(task: Task, step: int) -> None:
    task.optimizer.zero_grad()
    backward(task.loss(step))
    nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
    task.optimizer.step()


def clipping_as_with_horovod(task: Task, step: int) -> None:
    if task.size == 1:
        return clipping(task, step)
    task.optimizer.zero_grad()
    backward(task.loss(step))
    task.optimizer.synchronize()
    nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
    with task.optimizer.skip_synchronize():
        task.optimizer.step()
    return None


def accumulating(task: Task, step: int) -> None:
    task.optimizer.zero_grad()
    for part in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        backward(task.loss(step, part=part) / 2)
    task.optimizer.step()


def with_closure(task: Task, step: int) -> None:
    def closure() -> Tensor:
        task.optimizer.zero_grad()
        loss = task.loss(step)
        backward(loss)
        return loss

    task.optimizer.step(closure)


def with_uneven_inputs(task: Task, step: int) -> None:
    """Weight by samples: the ranks' shares of the batch's mean are summed."""
    images, labels = samples(step, BATCH + 1, torch.float32)
    errors = nn.functional.cross_entropy(
        task.model(images[task.rank :: task.size]), labels[task.rank :: task.size], reduction="sum"
    )
    task.optimizer.zero_grad()
    backward(errors / len(images))
    task.optimizer.step()


def scaling(task: Task, step: int) -> None:
    """Overflow on one rank in step 2: all ranks skip the step and lower the scale."""
    overflows = step == 2 and task.rank == task.size - 1
    task.optimizer.zero_grad()
    backward(task.scaler.scale(task.loss(step)) * (float("inf") if overflows else 1.0))
    task.scaler.step(task.optimizer)
    task.scaler.update()


def scaling_as_with_horovod(task: Task, step: int) -> None:
    if task.size == 1:
        return scaling_and_clipping(task, step)
    overflows = step == 2 and task.rank == task.size - 1
    task.optimizer.zero_grad()
    backward(task.scaler.scale(task.loss(step)) * (float("inf") if overflows else 1.0))
    task.optimizer.synchronize()
    task.scaler.unscale_(task.optimizer)
    nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
    with task.optimizer.skip_synchronize():
        task.scaler.step(task.optimizer)
    task.scaler.update()
    return None


def scaling_and_clipping(task: Task, step: int) -> None:
    task.optimizer.zero_grad()
    backward(task.scaler.scale(task.loss(step)) * (float("inf") if step == 2 else 1.0))
    task.scaler.unscale_(task.optimizer)
    nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
    task.scaler.step(task.optimizer)
    task.scaler.update()


def in_bfloat16(task: Task, step: int) -> None:
    task.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = task.loss(step)
    backward(loss)
    task.optimizer.step()


def freezing(task: Task, step: int) -> None:
    """Freeze the first layer for two steps; afterwards its gradients are shared again."""
    if step in {2, 4}:
        task.model[0].requires_grad_(step == 4)
    plainly(task, step)


def unfreezing(task: Task, step: int) -> None:
    """Unfreeze the first layer, which needs a new DistributedOptimizer."""
    if step == 0:
        task.model[0].requires_grad_(False)
        task.rewrapped()
    if step == 3:
        task.model[0].requires_grad_(True)
        task.rewrapped()
    plainly(task, step)


def compiled(backend: str) -> Callable[[Task, int], None]:
    def take_step(task: Task, step: int) -> None:
        model: Any = torch.compile(task.model, backend=backend)
        task.optimizer.zero_grad()
        images, labels = samples(step, BATCH, torch.float32)
        backward(nn.functional.cross_entropy(model(images[task.rank :: task.size]), labels[task.rank :: task.size]))
        task.optimizer.step()

    return take_step


# ---- the cases ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A training: its optimizer, the optimizer's options, and how it takes a step."""

    step: Callable[[Task, int], None] = plainly
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.2, "momentum": 0.8})
    options: dict[str, Any] = field(default_factory=dict)
    is_sparse: bool = False
    bound: float = 1e-4


ADAM: dict[str, Any] = {"lr": 0.02, "eps": 1e-4}
CASES = {
    "plain": Case(),
    "zero_grad in place": Case(step=keeping_gradients),
    "foreach": Case(settings={"lr": 0.2, "momentum": 0.8, "foreach": True}),
    "fused SGD": Case(settings={"lr": 0.2, "momentum": 0.8, "fused": True}),
    "fused AdamW": Case(kind=torch.optim.AdamW, settings={**ADAM, "fused": True}, step=keeping_gradients),
    "clipping": Case(step=clipping),
    "Horovod's clipping": Case(step=clipping_as_with_horovod),
    "accumulation": Case(step=accumulating, options={"backward_passes_per_step": 2}),
    "closure": Case(step=with_closure),
    "uneven inputs": Case(step=with_uneven_inputs, options={"op": mt.Sum}),
    "GradScaler": Case(step=scaling),
    "GradScaler, fused": Case(step=scaling, settings={"lr": 0.2, "momentum": 0.8, "fused": True}),
    "Horovod's AMP recipe": Case(step=scaling_as_with_horovod),
    "GradScaler, clipping": Case(step=scaling_and_clipping),
    # bfloat16 rounds each rank's products to 8 bits.
    "autocast": Case(step=in_bfloat16, bound=3e-2),
    "freezing": Case(step=freezing),
    "unfreezing": Case(step=unfreezing),
    "torch.compile, eager": Case(step=compiled("eager")),
    "torch.compile, aot_eager": Case(step=compiled("aot_eager")),
    "groups": Case(options={"groups": 3}),
    "predivided": Case(options={"gradient_predivide_factor": 2.0}),
    "sparse": Case(is_sparse=True, settings={"lr": 0.5}),
    "sparse, in place": Case(is_sparse=True, settings={"lr": 0.5}, step=keeping_gradients),
    "sparse, accumulation": Case(
        is_sparse=True, settings={"lr": 0.5}, step=accumulating, options={"backward_passes_per_step": 2}
    ),
    "sparse as dense": Case(is_sparse=True, settings={"lr": 0.5}, options={"sparse_as_dense": True}),
    "sparse, lazy Adam": Case(is_sparse=True, kind=torch.optim.SparseAdam, settings=ADAM),
    "sparse as dense, lazy Adam": Case(
        is_sparse=True, kind=torch.optim.SparseAdam, settings=ADAM, options={"sparse_as_dense": True}
    ),
    "sparse, groups": Case(is_sparse=True, settings={"lr": 0.5}, options={"groups": 1}),
}


class Words(nn.Module):
    """Two embedding tables; a batch uses some of their rows.

    For SparseAdam, nothing else is trained.
    """

    def __init__(self, *, is_all_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Embedding(30, 4, sparse=True)
        self.second = nn.EmbeddingBag(9, CLASSES, sparse=True, mode="sum")
        self.last = nn.Linear(4, CLASSES)
        self.last.requires_grad_(not is_all_sparse)

    def forward(self, images: Tensor) -> Tensor:
        words = (images.flatten(1)[:, :3].abs() * 6).long()
        found: Tensor = self.last(self.first(words % 30).mean(1)) + self.second(words % 9)
        return found


def trained(case: Case, rank: int, size: int) -> list[float]:
    """Return the parameters after `STEPS` steps."""
    is_lazy = case.kind is torch.optim.SparseAdam
    model = Words(is_all_sparse=is_lazy) if case.is_sparse else network(torch.float32)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = case.kind(parameters, **case.settings)
    task = Task(model, optimizer, rank, size)
    task.rewrapped(**case.options)
    for step in range(STEPS):
        case.step(task, step)
    found: list[float] = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    return found


def train_all(here: Here) -> dict[str, list[float]]:
    join(here)
    return {name: trained(case, here.rank, here.size) for name, case in CASES.items()}


def test_every_way_follows_the_single_process() -> None:
    torch.set_num_threads(1)
    everyones = run_ranks(train_all, RANKS, deadline_s=240.0)
    assert everyones[0] == everyones[1]  # equal in every bit
    deviations = {}
    for name, case in CASES.items():
        wanted = torch.tensor(trained(case, 0, 1))
        found = torch.tensor(everyones[0][name])
        assert not torch.equal(wanted, torch.tensor(start_of(case)))
        deviations[name] = float((found - wanted).abs().max() / wanted.abs().max()) / case.bound
    assert {name: share for name, share in deviations.items() if not share <= 1} == {}


def start_of(case: Case) -> list[float]:
    is_lazy = case.kind is torch.optim.SparseAdam
    model = Words(is_all_sparse=is_lazy) if case.is_sparse else network(torch.float32)
    found: list[float] = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    return found
