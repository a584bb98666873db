"""How long a plan takes, measured in a group."""

import time

import numpy as np

from multiring.planner import Plan, Task
from multiring.runtime import Group
from multiring.schedule import Collective, Wire

_FEWEST = 3


def time_plan(group: Group, task: Task, plan: Plan, *, seconds: float, drain_s: float = 0.0) -> float:
    """Return the seconds that an all_reduce of float32 takes by `plan`: the mean, and the slowest rank's.

    Every rank of the group calls it alike; the plan stays pinned for its task.

    Args:
        group: who takes part.
        task: an all_reduce; its size is a multiple of 4 bytes.
        plan: what to time.
        seconds: about how long to time.
        drain_s: about how long to run before: shaped links carry short bursts for free.
    """
    group.pin(task, plan)
    array = group.allocate(task.size_bytes // 4, np.float32)
    array[:] = 0
    wire = None if task.wire is Wire.NONE else task.wire.name.lower()
    for _ in range(_FEWEST):
        group.all_reduce(array, wire=wire)
    one_s = _agreed(group, _timed(group, array, wire, _FEWEST))
    _timed(group, array, wire, round(drain_s / one_s))
    # Bursts that went for free let the first ones look shorter than the rest.
    one_s = _agreed(group, _timed(group, array, wire, _FEWEST)) if drain_s else one_s
    return _agreed(group, _timed(group, array, wire, max(_FEWEST, round(seconds / one_s))))


def _timed(group: Group, array: "np.ndarray[tuple[int], np.dtype[np.float32]]", wire: str | None, calls: int) -> float:
    group.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        group.all_reduce(array, wire=wire)
    return (time.perf_counter() - begin) / max(calls, 1)


def _agreed(group: Group, seconds: float) -> float:
    found = np.array([seconds])
    group.all_reduce(found, "max")
    return max(float(found[0]), 1e-7)


def all_reduce_task(size_bytes: int) -> Task:
    """Return the task of an all_reduce of float32 of so many bytes."""
    return Task(collective=Collective.ALL_REDUCE, size_bytes=size_bytes)
