"""Price a schedule by the events of all of its ranks, each with its own links.

`price` is the case of equal ranks, which one rank represents. This module is the reference for it and for all faster
evaluations: it uses no symmetry.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from multiring._schedule import Collective, Schedule, Way
from multiring._schedule.expand import expand
from multiring._schedule.price import steps_of
from multiring._schedule.timing import TimedStep, last_end
from multiring._simulator.lockstep import distinct_ways, seconds_in_lockstep
from multiring._simulator.queued import seconds_in_queues
from multiring._simulator.rotation import is_rotated
from multiring.errors import ScheduleError

_LEAVES, _ENTERS = attrgetter("leaves"), attrgetter("enters")


def seconds_of_ranks(
    schedule: Schedule,
    size_bytes: float,
    ways: Sequence[Sequence[Way]],
    segments: int = 1,
    shared_bytes_per_s: Sequence[float] = (),
) -> float:
    """Return the same as `seconds_of_all`, but faster where that is possible."""
    refuse_strange(schedule, ways, len(shared_bytes_per_s))
    if segments == 1 and not shared_bytes_per_s:
        found = seconds_in_lockstep(schedule, size_bytes, ways)
        if found is not None:
            return found
    if not is_rotated(schedule):
        return seconds_of_all(schedule, size_bytes, ways, segments, shared_bytes_per_s)
    return seconds_in_queues(schedule, size_bytes, ways, segments, shared_bytes_per_s)


def seconds_of_all(
    schedule: Schedule,
    size_bytes: float,
    ways: Sequence[Sequence[Way]],
    segments: int = 1,
    shared_bytes_per_s: Sequence[float] = (),
) -> float:
    """Return the seconds until the last rank is done, from the steps of every rank.

    Args:
        schedule: the schedule to price.
        size_bytes: the size of the whole buffer: the blocks of all ranks, on the longer side.
        ways: for each rank, one Way per axis. If ranks join the grid, one more for the messages between joining ranks
            and their partners.
        segments: the number of equal pieces of the buffer.
        shared_bytes_per_s: the rates of the links to which `leaves` and `enters` of the ways refer.

    Raises:
        ScheduleError: `ways` has a wrong length, or refers to a link that is not shared.
    """
    refuse_strange(schedule, ways, len(shared_bytes_per_s))
    blocks = 1 if schedule.collective is Collective.BROADCAST else schedule.frame.blocks
    chunk_bytes = size_bytes / blocks / segments
    return last_end(programs_of(schedule), ways, chunk_bytes, segments, shared_bytes_per_s)


def refuse_strange(schedule: Schedule, ways: Sequence[Sequence[Way]], shared: int) -> None:
    """Raise ScheduleError unless `ways` has what each rank of `schedule` needs, of `shared` shared links."""
    wanted = len(schedule.grid) + bool(schedule.frame.joined)
    distinct = distinct_ways(ways)[0]
    lengths = set(map(len, distinct))
    if len(ways) != schedule.ranks or lengths != {wanted}:
        raise ScheduleError(
            f"ways of {len(ways)} ranks, {sorted(lengths)} each: want {wanted} for each of {schedule.ranks} ranks"
        )
    own_ways = list(chain.from_iterable(distinct))
    passed = set(map(_LEAVES, own_ways)) | set(map(_ENTERS, own_ways))
    strange = sorted(index for links in passed for index in links if not 0 <= index < shared)
    if strange:
        raise ScheduleError(f"a way through shared link {strange[0]}: want one of the {shared} shared links, from 0")


def programs_of(schedule: Schedule) -> list[tuple[TimedStep, ...]]:
    """Return the timed steps of every rank. A message is in the queue of its sender at its receiver."""
    frame = replace(schedule.frame, shares=(1,))
    itself = range(schedule.ranks)
    at = {rank: frame.coordinates_of(rank) for rank in frame.order}
    beyond = len(schedule.grid)

    def routing(rank: int, peer: int) -> tuple[int, int, int]:
        if rank not in at or peer not in at:
            return beyond, rank, peer
        here, there = at[rank], at[peer]
        return next(axis for axis in range(beyond) if here[axis] != there[axis]), rank, peer

    return [steps_of(rank, expand(frame, schedule.phases, rank), routing, itself) for rank in itself]
