"""Measure the time of a plan in a group."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from multiring._runtime import Group
from multiring._schedule import Collective, Wire
from multiring.planner import Plan, Task

_FEWEST = 3
_TURNS = 5


Usual = Callable[[Iterable[float]], float]


def time_plan(
    group: Group, task: Task, plan: Plan, *, seconds: float, drain_s: float = 0.0, usual: Usual = statistics.median
) -> float:
    """Return the seconds that an all_reduce of float32 takes under `plan`, on the slowest rank.

    Between hosts the result is the mean of the calls, because shaped links carry some calls at full speed. Within a
    host it is the `usual` call, which excludes delays by other work. Every rank of the group calls this function with
    the same arguments. The plan stays pinned for its task.

    Args:
        group: the group that runs the all_reduce.
        task: an all_reduce; its size is a multiple of 4 bytes.
        plan: the plan to time.
        seconds: about how long to time.
        drain_s: about how long to run before: shaped links carry short bursts at full speed.
        usual: chooses one of several times within a host.
    """
    group.pin(task, plan)
    array = group.allocate(task.size_bytes // 4, np.float32)
    array[:] = 0
    wire = None if task.wire is Wire.NONE else task.wire.name.lower()
    for _ in range(_FEWEST):
        group.all_reduce(array, wire=wire)
    one_s = _agreed(group, _timed(group, array, wire, _FEWEST, usual))
    _timed(group, array, wire, round(drain_s / one_s), usual)
    # Bursts at full speed made the first calls shorter than later calls, so measure again.
    one_s = _agreed(group, _timed(group, array, wire, _FEWEST, usual)) if drain_s else one_s
    return _agreed(group, _timed(group, array, wire, max(_FEWEST, round(seconds / one_s)), usual))


def time_plans(
    group: Group,
    task: Task,
    plans: Sequence[Plan],
    *,
    seconds: float,
    drain_s: float = 0.0,
    usual: Usual = statistics.median,
) -> list[float]:
    """Return the time of each of `plans`, see `time_plan`.

    Plans take turns, so that other work delays all plans alike.

    Every rank of the group calls this function with the same arguments. One of the plans stays pinned for the task.
    """
    turns = [
        [
            time_plan(group, task, plan, seconds=seconds / _TURNS, drain_s=0.0 if turn else drain_s, usual=usual)
            for plan in plans
        ]
        for turn in range(_TURNS)
    ]
    return [usual(taken) for taken in zip(*turns, strict=True)]


def _timed(
    group: Group, array: "np.ndarray[tuple[int], np.dtype[np.float32]]", wire: str | None, calls: int, usual: Usual
) -> float:
    group.barrier()
    ends = [time.perf_counter()]
    for _ in range(calls):
        group.all_reduce(array, wire=wire)
        ends.append(time.perf_counter())
    if not calls:
        return 0.0
    if len(group.topology.hosts) == 1:
        return usual(end - begin for begin, end in itertools.pairwise(ends))
    return (ends[-1] - ends[0]) / calls


def _agreed(group: Group, seconds: float) -> float:
    found = np.array([seconds])
    group.all_reduce(found, "max")
    return max(float(found[0]), 1e-7)


def all_reduce_task(size_bytes: int) -> Task:
    """Return the task of an all_reduce of `size_bytes` bytes of float32."""
    return Task(collective=Collective.ALL_REDUCE, size_bytes=size_bytes)
