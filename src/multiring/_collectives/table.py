"""The table of algorithms: it maps a collective and an algorithm's name to a builder."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from multiring._collectives.direct import direct, direct_all_to_all, direct_broadcast
from multiring._collectives.direct_ring import direct_ring
from multiring._collectives.exchange import exchange
from multiring._collectives.ring import ring
from multiring._collectives.tree import tree_broadcast
from multiring._schedule import SUMS, Accumulation, Collective, Frame, Schedule
from multiring.errors import ScheduleError

Builder = Callable[[Frame, Accumulation], Schedule]

TABLE: Mapping[tuple[Collective, str], Builder] = MappingProxyType(
    {
        (Collective.ALL_REDUCE, "direct"): direct,
        (Collective.ALL_REDUCE, "exchange"): exchange,
        (Collective.ALL_REDUCE, "ring"): ring,
        (Collective.ALL_REDUCE, "direct_ring"): direct_ring,
        (Collective.REDUCE_SCATTER, "direct"): direct,
        (Collective.REDUCE_SCATTER, "ring"): ring,
        (Collective.REDUCE_SCATTER, "direct_ring"): direct_ring,
        (Collective.ALL_GATHER, "direct"): direct,
        (Collective.ALL_GATHER, "ring"): ring,
        (Collective.ALL_GATHER, "direct_ring"): direct_ring,
        (Collective.BROADCAST, "direct"): direct_broadcast,
        (Collective.BROADCAST, "tree"): tree_broadcast,
        (Collective.ALL_TO_ALL, "direct"): direct_all_to_all,
    }
)


def algorithms_of(collective: Collective) -> tuple[str, ...]:
    """Return the names of the algorithms for `collective`."""
    return tuple(name for known, name in TABLE if known is collective)


def build(algorithm: str, frame: Frame, accumulation: Accumulation = Accumulation.SAME) -> Schedule:
    """Build the schedule of `frame.collective` with the named algorithm.

    `accumulation` is ignored for a collective that does not sum; its schedule has SAME.

    Raises:
        ScheduleError: the collective has no such algorithm, or the algorithm rejects `accumulation` or a wire type.
    """
    builder = TABLE.get((frame.collective, algorithm))
    if builder is None:
        known = ", ".join(algorithms_of(frame.collective))
        raise ScheduleError(f"no algorithm {algorithm!r} for {frame.collective.value}; known are {known}")
    return builder(frame, accumulation if frame.collective in SUMS else Accumulation.SAME)
