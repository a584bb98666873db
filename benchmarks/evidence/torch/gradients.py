"""Provide helpers for main.py, and its families about gradient memory."""

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.evidence.support.cases import Fault, Random
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt

CLOSE = 1e-5  # the largest allowed difference in float32 after some steps


@cache
def ready() -> tuple[int, int]:
    """Join the job, also through torch.distributed; return the rank and the size."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mt.init()
    dist.init_process_group("multiring", init_method="multiring://", timeout=timedelta(seconds=10))
    return mt.rank(), mt.size()


def network(random: Random) -> tuple[Callable[[], nn.Sequential], int]:
    """Return a function that makes the same random network at each call.

    Returns:
        The function, and the number of input features.
    """
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
    """Return the samples of the given ranks, four for each rank."""
    each = [torch.randn(4, features, generator=torch.Generator().manual_seed(1000 * seed + rank)) for rank in ranks]
    return torch.cat(each)


def backward(loss: Tensor) -> None:
    """Run `loss.backward()`."""
    loss.backward()  # type: ignore[no-untyped-call] # torch's own


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def optimizer_of(random: Random) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes an optimizer of a random kind."""
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
MOVES = {"data", "set", "shared", "strided"}  # changes that move the memory of the tensor in `.grad`


def memory(random: Random, _folder: Path) -> Iterator[Fault]:
    """Change gradients at random steps.

    The ranks must still train like one process.
    """
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
    """Train with `gradient_lag` under DistributedDataParallel.

    Each step applies the previous gradient. The weights must be those of the same rule computed by hand.
    """
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
