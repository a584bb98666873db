"""Compose patterns over the axes of a grid: reduce-scatters along axes 1 to k, then all-gathers from k back to 1.

Along every axis all lines work at once, so the links of all ranks are busy. Each axis may use another algorithm.

Sources: Cho et al., "PowerAI DDL", 2017, arXiv 1708.02188; Cho et al., "BlueConnect: Decomposing all-reduce
for deep learning on heterogeneous network hierarchy", MLSys 2019.
"""

from collections.abc import Iterable, Sequence

from multiring._schedule import Accumulation, Collective, Frame, Pattern, Phase, Schedule, names_of
from multiring.errors import ScheduleError


def over_axes(
    algorithm: str, frame: Frame, accumulation: Accumulation, pairs: Sequence[tuple[Pattern, Pattern]]
) -> Schedule:
    """Return the schedule that uses `pairs[i]`, a reduce-scatter and an all-gather, along axis i of the grid."""
    scatter = tuple(Phase(axis, pair[0]) for axis, pair in enumerate(pairs))
    gather = tuple(Phase(axis, pair[1]) for axis, pair in enumerate(pairs))[::-1]
    phases = {
        Collective.ALL_REDUCE: scatter + gather,
        Collective.REDUCE_SCATTER: scatter,
        Collective.ALL_GATHER: gather,
    }[frame.collective]
    return Schedule(algorithm=algorithm, frame=frame, phases=phases, accumulation=accumulation)


def refuse_coded(algorithm: str, frame: Frame, axes: Iterable[int]) -> None:
    """Raise ScheduleError if one of `axes` has a lossy wire: `algorithm` does not use direct patterns on these axes."""
    if any(frame.wire_of(axis) for axis in axes):
        raise ScheduleError(
            f"wires={names_of(frame.wires)}: {algorithm} rounds more than once on a coded axis, or differently on"
            " different ranks: use direct"
        )
