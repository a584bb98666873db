"""Measured overheads of torch: optimizer updates, DTensor dispatch and copies."""

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from multiring.planner.parallelism import Overheads
from multiring.torch.parallelizing.measuring import slowest

_LARGE = 1 << 21  # elements: more than a core's own cache holds
_SMALL, _MANY = 16, 8
_LEAST = 1 << 14  # elements: in smaller tensors the time per tensor dominates, not the time per byte
_TURNS = 5
# Overheads in multiples of a divided layer's dispatch: the hooks around a group that fully_shard gathers and reduces,
# and those around a microbatch. Neither can be timed without a collective; benchmarks/evidence/parallelize/main.py
# measured them.
_SHARDED_UNIT, _MICROBATCH = 3.0, 3.0


def measured_overheads(parameters: Iterable[Tensor], optimizer_states: int, collective_s: float) -> Overheads:
    """Return the overheads of the slowest rank.

    Every rank calls it, and all compute at once.

    Args:
        parameters: the model's parameters, the same on all ranks. Their size matters, because an optimizer takes a few
            times as long for a byte outside the caches as for a byte of a small tensor.
        optimizer_states: the optimizer's states per parameter. 0 is measured as plain SGD, 1 as SGD with momentum, 2 as
            Adam; larger numbers are extrapolated from Adam.
        collective_s: forecast seconds of an all-reduce of four bytes among all ranks.
    """
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("all",))
    usual = max(_LEAST, min(_LARGE, _usual_elements(parameters)))
    large, parts = _tensors_of(usual), _tensors_of(max(_LEAST, usual // dist.get_world_size()))
    plain = [nn.Parameter(torch.zeros(_SMALL)) for _ in range(_MANY)]
    dtensors = [nn.Parameter(DTensor.from_local(torch.zeros(_SMALL), mesh, [Shard(0)])) for _ in range(_MANY)]
    word = torch.zeros(1)
    times = max(1.0, optimizer_states / 2)
    large_s, parts_s, plain_s, dtensor_s, split_s, copy_s, sum_s, small_s = slowest(
        *(times * _shortest(_update(each, optimizer_states)) for each in (large, parts, plain, dtensors)),
        _shortest(_divided(mesh)),
        _shortest(torch.zeros(_LARGE).clone),
        _shortest(_summed(usual)),
        _usual(lambda: dist.all_reduce(word)),
    )
    return Overheads(
        collective_s=max(0.0, small_s - collective_s),
        update_s_per_byte=_per_byte(large, large_s, plain_s / _MANY),
        update_s_per_divided_byte=_per_byte(parts, parts_s, plain_s / _MANY),
        update_s_per_parameter=plain_s / _MANY,
        update_s_per_dtensor=dtensor_s / _MANY,
        sharded_unit_s=_SHARDED_UNIT * split_s,
        split_module_s=split_s,
        microbatch_s=_MICROBATCH * split_s,
        copy_s_per_byte=copy_s / (_LARGE * torch.float32.itemsize),
        sum_s_per_byte=sum_s / (_LARGE // usual * usual * torch.float32.itemsize),
    )


def _tensors_of(elements: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(elements)) for _ in range(_LARGE // elements)]


def _per_byte(tensors: list[nn.Parameter], seconds: float, each_s: float) -> float:
    """Return an update's seconds per byte of `tensors`, beyond its seconds per tensor."""
    return max(0.0, seconds - len(tensors) * each_s) / sum(each.nbytes for each in tensors)


def _usual_elements(parameters: Iterable[Tensor]) -> int:
    """Return the size of the tensor that holds the median element, in elements."""
    counts = sorted(each.numel() for each in parameters)
    passed = accumulate(counts)
    return next((count for count, until in zip(counts, passed, strict=True) if 2 * until >= sum(counts)), 0)


def _update(parameters: list[nn.Parameter], states: int) -> Callable[[], object]:
    for each in parameters:
        each.grad = torch.zeros_like(each)
    if states >= 2:
        return torch.optim.Adam(parameters).step
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if states else 0.0).step


def _divided(mesh: DeviceMesh) -> Callable[[], object]:
    """Return a function that runs a divided layer so small that only its dispatch takes time."""
    weight = nn.Parameter(DTensor.from_local(torch.zeros(1, _SMALL), mesh, [Shard(0)]))
    sample = torch.zeros(1, _SMALL)

    def turn() -> None:
        given = DTensor.from_local(sample, mesh, [Replicate()], run_check=False)
        divided = nn.functional.linear(given, weight)
        made = divided.to_local() if isinstance(divided, DTensor) else divided
        torch.autograd.backward([made], [torch.ones_like(made)])

    return turn


def _summed(elements: int) -> Callable[[], object]:
    """Return a function that adds tensors of `elements` elements, as autograd adds gradients."""
    pairs = [(torch.zeros(elements), torch.zeros(elements)) for _ in range(_LARGE // elements)]

    def turn() -> None:
        for total, each in pairs:
            total.add_(each)

    return turn


def _shortest(turn: Callable[[], object]) -> float:
    """Return the seconds of the shortest turn; each turn starts on all ranks together."""
    found = []
    for _ in range(_TURNS):
        dist.barrier()
        begin = time.perf_counter()
        turn()
        found.append(time.perf_counter() - begin)
    return min(found)


def _usual(turn: Callable[[], object]) -> float:
    """Return the median seconds of several consecutive turns."""
    found = [time.perf_counter()]
    for _ in range(4 * _TURNS):
        turn()
        found.append(time.perf_counter())
    return statistics.median(end - begin for begin, end in pairwise(found))
