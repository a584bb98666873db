"""Price a schedule in seconds.

The model is LogGP's with one port per rank, direction and physical link; docs/algorithms.md has its closed forms. A
port handles a message of b bytes for the overhead. Then the message occupies the wire for b / bandwidth, and the port
handles the next message. The message arrives one latency later, and occupies its receiver's port equally long. A SEND
has no further cost for its rank. A receive waits. A REDUCE or a local COPY that writes b bytes has a further cost of b
/ reduce bandwidth. A lossy wire carries fewer bytes; encoding, and decoding in a COPY, cost as much as a local COPY. A
buffer may be cut into segments that are processed side by side.

On a grid without a root, all ranks have the same moves up to a rotation of each axis. So the peer at offset -d sends
the same messages as the rank itself sends to offset +d. Therefore the moves of one representative rank are enough. If
ranks join the grid, the representative is a rank with the most joining ranks, which are timed beside it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from multiring._schedule.expand import expand
from multiring._schedule.kinds import Collective, Kind, Wire
from multiring._schedule.model import Schedule
from multiring._schedule.moves import Moves
from multiring._schedule.timing import MOST_LANES, StepMessage, TimedOperation, TimedStep, Way, last_end
from multiring._schedule.wire import COMMON_BLOCK, encoded_bytes
from multiring._topology import Link
from multiring.errors import ScheduleError

# (rank, peer) -> (axis, queue at the peer for messages that rank sends, queue at rank for messages that rank receives)
Routing = Callable[[int, int], tuple[int, int, int]]

_CARRIED = {
    wire: encoded_bytes(wire, COMMON_BLOCK) / (4 * COMMON_BLOCK) for wire in Wire
}  # encoded bytes / float32 bytes

_RESULT = -1  # the queue of a joining rank; its partner takes messages of its i-th joining rank from queue -i

MOST_MESSAGES = 600  # the most messages that are timed one by one


def price(schedule: Schedule, size_bytes: float, ways: Sequence[Link | Way], segments: int = 1) -> float:
    """Return the seconds that `schedule` takes.

    Args:
        schedule: the schedule to price.
        size_bytes: the size of the whole buffer: the blocks of all ranks, on the longer side.
        ways: one per axis. If ranks join the grid, one more for the messages between joining ranks and their partners.
            Several channels share a way in proportion to their weights. A Link counts as a Way with its own port.
        segments: the number of equal pieces of the buffer. If there are many, `price` simulates a few and extrapolates
            the rest; tests/pure checks that the error is at most 3 %.

    Raises:
        ScheduleError: `ways` has a wrong length.
    """
    if len(ways) != _kinds_of_way(schedule):
        more = ", and one for those that join" if schedule.frame.joined else ""
        raise ScheduleError(f"{len(ways)} links for grid {schedule.grid}: want one for every axis{more}")
    known = tuple(way if isinstance(way, Way) else Way(link=way, port=axis) for axis, way in enumerate(ways))
    if schedule.collective is Collective.BROADCAST:
        return _price_broadcast(schedule, size_bytes / segments, known, segments)
    chunk_bytes = size_bytes / segments / schedule.frame.blocks
    steps = (representative(schedule), *_joining(schedule))
    affordable = max(2, MOST_MESSAGES // max(1, messages_of(schedule)))
    # Lanes that mostly wait process their segments in waves, so the extrapolated segments are whole waves.
    timed = segments if segments <= affordable else min(MOST_LANES + segments % MOST_LANES, affordable)
    ways_of_ranks = (known,) * len(steps)
    found = last_end(steps, ways_of_ranks, chunk_bytes, timed)
    if timed == segments:
        return found
    waiting_s = last_end(steps, ways_of_ranks, chunk_bytes, 1) / MOST_LANES
    working_s = least(schedule, size_bytes, known, [segments])[0] / segments
    return found + (segments - timed) * max(waiting_s, working_s)


def timed_operation(
    schedule: Schedule, size_bytes: float, ways: Sequence[Way], segments: int, start_s: float = 0.0
) -> TimedOperation:
    """Return what `price` times, as an operation that may be in flight beside others; see `ends_of`.

    Args:
        schedule: a schedule of another collective than the broadcast, whose ranks differ.
        size_bytes: see `price`.
        ways: see `price`; Ways only.
        segments: see `price`.
        start_s: when the ranks start the operation, in seconds.
    """
    steps = (representative(schedule), *_joining(schedule))
    chunk_bytes = size_bytes / segments / schedule.frame.blocks
    return TimedOperation(steps, (tuple(ways),) * len(steps), chunk_bytes, segments, start_s)


def messages_of(schedule: Schedule) -> int:
    """Return the number of messages that a rank sends for each segment."""
    return sum(loads(schedule)[0])


def busy_s(schedule: Schedule, size_bytes: float, ways: Sequence[Way], segments: int) -> dict[str, float]:
    """Return the seconds for which the whole buffer occupies each resource of a rank, by the resource's name.

    The resources are the wire and the handling of each port, the uplink, and the rank itself.
    """
    messages, chunks, written = loads(schedule)
    found: dict[str, float] = {"uplink": 0.0, "rank": 0.0}
    for way, count, sent, own in zip(ways, messages, chunks, written, strict=True):
        link, wire, handling = way.link, f"wire {way.port}", f"handling {way.port}"
        moved = size_bytes / schedule.frame.blocks
        found[handling] = found.get(handling, 0.0) + segments * count * link.overhead_s
        found[wire] = found.get(wire, 0.0) + sent * moved / link.bandwidth_bytes_per_s
        found["uplink"] += 0.0 if way.uplink_bytes_per_s is None else sent * moved / way.uplink_bytes_per_s
        found["rank"] += own * moved / link.reduce_bytes_per_s
    return found


def least(schedule: Schedule, size_bytes: float, ways: Sequence[Way], segments: Sequence[int]) -> list[float]:
    """Return a cheap lower bound of `price` in seconds for each of several numbers of segments.

    The bound is the work of the busiest port, or of the rank itself, or the latencies of messages that follow each
    other.
    """
    if schedule.collective is Collective.BROADCAST:
        return [0.0] * len(segments)
    messages, chunks, written = loads(schedule)
    handled: dict[int, float] = {}
    wired: dict[int, float] = {}
    uplinked = 0.0
    for way, count, sent in zip(ways, messages, chunks, strict=True):
        handled[way.port] = handled.get(way.port, 0.0) + count * way.link.overhead_s
        wired[way.port] = wired.get(way.port, 0.0) + sent / way.link.bandwidth_bytes_per_s
        uplinked += 0.0 if way.uplink_bytes_per_s is None else sent / way.uplink_bytes_per_s
    own = sum(each / way.link.reduce_bytes_per_s for way, each in zip(ways, written, strict=True))
    # The bytes are the same in any number of segments; the messages are not.
    moved_s = max(*wired.values(), uplinked, own) * size_bytes / schedule.frame.blocks
    handled_s = max(handled.values())
    turns = zip(ways, rounds(schedule), strict=True)
    waited_s = sum(count * (way.link.latency_s + way.link.overhead_s) for way, count in turns)
    return [max(moved_s, each * handled_s, waited_s) for each in segments]


@lru_cache(maxsize=512)
def loads(schedule: Schedule) -> tuple[list[int], list[float], list[float]]:
    """Return, by axis, the messages that a rank sends in a segment, the chunks on the wire, and the chunks written."""
    kinds, rank = _kinds_of_way(schedule), _represents(schedule)
    moves = expand(replace(schedule.frame, shares=(1,)), schedule.phases, rank)
    axis_of = np.full(schedule.ranks, len(schedule.grid))  # ranks on no line through this rank join it
    for axis in range(len(schedule.grid)):
        axis_of[schedule.frame.line_of(rank, axis)] = axis
    row = np.repeat(np.arange(len(moves)), np.diff(moves.peer_start))
    to_others = moves.peers != rank
    row, axes = row[to_others], axis_of[moves.peers[to_others]]
    is_send, is_coded = moves.kind == Kind.SEND, moves.wire != Wire.NONE
    sent = is_send[row]
    carried = np.array([_CARRIED[wire] for wire in sorted(Wire)])[moves.wire]
    messages = np.bincount(axes[sent], minlength=kinds)
    chunks = np.bincount(axes[sent], (moves.span * carried)[row[sent]], minlength=kinds)
    peers, first = np.unique(row, return_index=True)
    axis_of_move = np.zeros(len(moves), np.intp)  # a local copy counts for the first axis
    axis_of_move[peers] = axes[first]
    is_alone = np.ones(len(moves), np.bool_)
    is_alone[peers] = False
    writes = is_coded | (~is_send & (is_alone | (moves.kind == Kind.REDUCE)))
    written = np.bincount(axis_of_move[writes], moves.span[writes], minlength=kinds)
    return messages.tolist(), chunks.tolist(), written.tolist()


@lru_cache(maxsize=512)
def rounds(schedule: Schedule) -> list[int]:
    """Return, by axis, how many messages follow each other: each is sent after the one before has been taken.

    The count is a lower bound. It is 0 for all axes if some message is taken in a later round than that of its sending.
    """
    kinds, rank = _kinds_of_way(schedule), _represents(schedule)
    none = [0] * kinds
    if schedule.frame.joined:
        return none
    moves = expand(replace(schedule.frame, shares=(1,)), schedule.phases, rank)
    row = np.repeat(np.arange(len(moves)), np.diff(moves.peer_start))
    row, peers = row[moves.peers != rank], moves.peers[moves.peers != rank]
    if not len(row):
        return none
    is_send = (moves.kind == Kind.SEND)[row]
    # A round begins with a send after a take.
    of_round = np.cumsum(is_send & np.concatenate([[False], ~is_send[:-1]]))
    # The n-th message from the peer at offset -d is the n-th that this rank sends to the peer at offset d.
    away, back = np.zeros(schedule.ranks, np.int64), np.zeros(schedule.ranks, np.int64)
    axis_of = np.zeros(schedule.ranks, np.int64)
    for axis, size in enumerate(schedule.grid):
        line, at = schedule.frame.line_of(rank, axis), schedule.frame.coordinates_of(rank)[axis]
        offset = (np.arange(size) - at) % size
        others = offset > 0
        away[line[others]] = axis * max(schedule.grid) + offset[others]
        back[line[others]] = axis * max(schedule.grid) + size - offset[others]
        axis_of[line[others]] = axis
    sent, taken = np.flatnonzero(is_send), np.flatnonzero(~is_send)
    sent = sent[np.argsort(away[peers[sent]], kind="stable")]
    taken = taken[np.argsort(back[peers[taken]], kind="stable")]
    if len(sent) != len(taken) or (of_round[sent] != of_round[taken]).any():
        return none
    # A round of several axes counts for the first of them only, which can only lower the bound.
    _, first = np.unique(of_round[np.sort(taken)], return_index=True)
    return list(map(int, np.bincount(axis_of[peers[np.sort(taken)[first]]], minlength=kinds)))


@lru_cache(maxsize=512)
def representative(schedule: Schedule) -> tuple[TimedStep, ...]:
    """Return the timed steps of the representative rank.

    A peer's messages to this rank are the same as this rank's own messages.
    """
    rank = _represents(schedule)
    frame = replace(schedule.frame, shares=(1,))
    offsets = _offsets_of(schedule, rank)
    joined = {peer: index for index, peer in enumerate(frame.joined_to(rank), 1)}

    def turn(_: int, peer: int) -> tuple[int, int, int]:
        if peer in joined:
            return len(schedule.grid), _RESULT, -joined[peer]
        axis, offset = offsets[peer]
        width = max(schedule.grid)
        return axis, axis * width + offset, axis * width + schedule.grid[axis] - offset

    return steps_of(rank, expand(frame, schedule.phases, rank), turn, {**dict.fromkeys(offsets, 0), **joined})


def _joining(schedule: Schedule) -> list[tuple[TimedStep, ...]]:
    """Return the timed steps of the ranks that join the representative, in order; they use the last way."""
    frame, partner = replace(schedule.frame, shares=(1,)), _represents(schedule)
    return [
        steps_of(
            rank,
            expand(frame, schedule.phases, rank),
            lambda _, __, index=index: (len(schedule.grid), -index, _RESULT),  # type: ignore[misc]
            {partner: 0},
        )
        for index, rank in enumerate(frame.joined_to(partner), 1)
    ]


def _represents(schedule: Schedule) -> int:
    """Return the rank with the most work: the first rank with the most joining ranks."""
    if not schedule.frame.joined:
        return schedule.order[0]
    joining = Counter(partner for _, partner in schedule.frame.joined)
    return max(schedule.order, key=joining.__getitem__)


def _kinds_of_way(schedule: Schedule) -> int:
    return len(schedule.grid) + bool(schedule.frame.joined)


def _offsets_of(schedule: Schedule, rank: int) -> dict[int, tuple[int, int]]:
    """Return, for every peer on a line through `rank`, the axis and the peer's offset along it."""
    found = {}
    for axis, at in enumerate(schedule.frame.coordinates_of(rank)):
        line = schedule.frame.line_of(rank, axis).tolist()
        found.update({peer: (axis, (q - at) % len(line)) for q, peer in enumerate(line) if q != at})
    return found


def steps_of(
    rank: int, moves: Moves, routing: Routing, index_of: Mapping[int, int] | Sequence[int]
) -> tuple[TimedStep, ...]:
    """Return the timed steps of `moves`, the moves of `rank`.

    `index_of` maps peers to indices of timed ranks.
    """
    steps = []
    for move in moves.rows():
        peers = [(peer, *routing(rank, peer)) for peer in move.peers if peer != rank]
        if move.kind is Kind.SEND:
            sends = tuple(StepMessage(axis, index_of[peer], sent, peer) for peer, axis, sent, _ in peers)
            codes = peers[0][1] if move.wire else -1
            steps.append(TimedStep(move.span, sends, (), codes, _CARRIED[move.wire]))
            continue
        writes = move.kind is Kind.REDUCE or not peers or bool(move.wire)
        axis = peers[0][1] if peers else 0
        steps.append(TimedStep(move.span, (), tuple(taken for *_, taken in peers), axis if writes else -1))
    return tuple(steps)


def _price_broadcast(schedule: Schedule, size_bytes: float, ways: Sequence[Way], segments: int) -> float:
    """Return the seconds of a broadcast.

    A rank starts the next axis as soon as it has the data. The last rank of an axis is also the last rank of the next
    axis. Further segments follow at the pace of the slowest port. Axes with the same port take turns on it.
    """
    total, paces = 0.0, [0.0] * (1 + max(way.port for way in ways))
    for phase in schedule.phases:
        way, ranks = ways[phase.axis], schedule.grid[phase.axis]
        programs = [
            steps_of(at, phase.pattern.program(ranks, at), lambda at, peer: (0, at, peer), {r: r for r in range(ranks)})
            for at in range(ranks)
        ]
        alone = ((replace(way, port=0),),) * ranks
        one = last_end(programs, alone, size_bytes, 1)
        total += one
        if segments > 1:
            paces[way.port] += last_end(programs, alone, size_bytes, 2) - one
    return total + (segments - 1) * max(paces)
