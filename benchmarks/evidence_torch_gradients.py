"""What the families of benchmarks/evidence_torch.py share, and those about gradients and their memory."""

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.evidence_cases import Fault, Random
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt

CLOSE = 1e-5  # of float32, after some steps


@cache
def ready() -> tuple[int, int]:
    """Join the job, also by torch.distributed; return this rank and how many there are."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mt.init()
    dist.init_process_group("multiring", init_method="multiring://", timeout=timedelta(seconds=10))
    return mt.rank(), mt.size()


def network(random: Random) -> tuple[Callable[[], nn.Sequential], int]:
    """Return what makes a random network, the same each time, and how many features its input has."""
    widths = [int(each) for each in random.integers(1, 12, int(random.integers(2, 5)))]
    seed, has_bias = int(random.integers(1 << 30)), bool(random.integers(2))

    def make() -> nn.Sequential:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after, bias=has_bias), nn.Tanh()]
        return nn.Sequential(*layers)

    return make, widths[0]


def drawn(seed: int, ranks: Any, features: int) -> Tensor:
    """Return the samples of these ranks, four of each."""
    each = [torch.randn(4, features, generator=torch.Generator().manual_seed(1000 * seed + rank)) for rank in ranks]
    return torch.cat(each)


def backward(loss: Tensor) -> None:
    """Run `loss.backward()`."""
    loss.backward()  # type: ignore[no-untyped-call] # torch's own


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return how far the parameters of two models are from each other."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def optimizer_of(random: Random) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes a random optimizer."""
    rate = float(random.uniform(0.01, 0.2))
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, rate),
        lambda p: torch.optim.SGD(p, rate, momentum=0.5, nesterov=True),
        lambda p: torch.optim.Adagrad(p, rate),
        lambda p: torch.optim.SGD(p, rate, weight_decay=0.1),
    ]
    return kinds[int(random.integers(len(kinds)))]


# ---- memory ----


def _data(_parameter: Any, gradient: Tensor, factor: float) -> None:
    gradient.data = gradient.data * factor


def _set(_parameter: Any, gradient: Tensor, factor: float) -> None:
    other = gradient * factor
    gradient.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())


def _replace(parameter: Any, gradient: Tensor, factor: float) -> None:
    parameter.grad = gradient * factor


def _share(_parameter: Any, gradient: Tensor, _factor: float) -> None:
    gradient.share_memory_()  # type: ignore[no-untyped-call] # torch's own


def _in_place(_parameter: Any, gradient: Tensor, factor: float) -> None:
    gradient.mul_(factor)


def _strided(_parameter: Any, gradient: Tensor, _factor: float) -> None:
    gradient.data = gradient.data.t().contiguous().t()


def _parameter(parameter: Any, _gradient: Tensor, _factor: float) -> None:
    parameter.data = parameter.data.clone()


def _drop(parameter: Any, _gradient: Tensor, _factor: float) -> None:
    parameter.grad = None


CHANGES = {
    "data": _data,
    "set": _set,
    "replaced": _replace,
    "shared": _share,
    "in place": _in_place,
    "strided": _strided,
    "parameter": _parameter,
    "dropped": _drop,
}
MOVES = {"data", "set", "shared", "strided"}  # of the tensor that `.grad` is


def memory(random: Random, _folder: Path) -> Iterator[Fault]:
    """Change gradients at random steps; the ranks stay one process."""
    rank, ranks = ready()
    make, features = network(random)
    kind = optimizer_of(random)
    names = sorted(CHANGES)
    steps = int(random.integers(3, 7))
    plan = [names[int(random.integers(len(names)))] if random.random() < 0.6 else "" for _ in range(steps)]
    to_none, factor = bool(random.integers(2)), float(random.uniform(0.2, 1.0))
    seed, bucket_bytes = int(random.integers(1 << 20)), int(random.choice([64, 256, 1 << 20]))

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, those: Any) -> None:
        for step, name in enumerate(plan):
            optimizer.zero_grad(set_to_none=to_none)
            backward(model(drawn(seed + step, those, features)).square().mean())
            for parameter in model.parameters() if name else ():
                if parameter.grad is not None:
                    CHANGES[name](parameter, parameter.grad, factor)
            optimizer.step()

    own, alone = make(), make()
    shared = mt.DistributedOptimizer(kind(own.parameters()), own.named_parameters(), bucket_bytes=bucket_bytes)
    run(own, shared, [rank])
    run(alone, kind(alone.parameters()), range(ranks))
    if apart(own, alone) > CLOSE:
        sign = "memory: not one process" if MOVES & set(plan) else "objects: not one process"
        yield Fault(sign, f"{plan}, set_to_none={to_none}: {apart(own, alone):.1e} from one process")


def lag(random: Random, _folder: Path) -> Iterator[Fault]:
    """Let a step apply the gradient before, under DDP, beside the same by hand."""
    rank, ranks = ready()
    make, features = network(random)
    views, rate, steps = bool(random.integers(2)), float(random.uniform(0.01, 0.1)), int(random.integers(3, 7))
    seed = int(random.integers(1 << 20))
    own, alone = make(), make()
    wrapped = DistributedDataParallel(own, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(own.parameters(), rate)
    mt.gradient_lag(optimizer)
    waiting: list[Tensor] = []
    for step in range(steps):
        backward(wrapped(drawn(seed + step, [rank], features)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        found = torch.autograd.grad(
            alone(drawn(seed + step, range(ranks), features)).square().mean(), list(alone.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(alone.parameters(), waiting, strict=False):
                parameter.sub_(rate * gradient)
        waiting = list(found)
    if apart(own, alone) > CLOSE:
        yield Fault("lag: another gradient is applied", f"views={views}, {steps} steps: {apart(own, alone):.1e}")
