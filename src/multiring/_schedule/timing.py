"""Simulate ranks that run several segments and several operations at once: the events in order of time.

A port handles a message, then puts it on the wire while it handles the next message. The message then passes the links
that ranks share, if there are any, and travels for the latency. At the receiver it passes the wire, then the port. A
rank runs its segments as lanes: it serves the oldest segment that can proceed, and does one thing at a time. Several
operations may be in flight: a rank serves the oldest operation first. A port sends messages in the order in which they
are queued. Once a connection has queued its limit, the messages of the oldest operation are queued next.
docs/algorithms.md has the model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from multiring._schedule.queues import PortQueue, TimedMessage
from multiring._topology import Link

MOST_LANES = 16  # the native executor runs at most this many lanes at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """The links that a rank's messages along an axis pass.

    `link` has the constants; its bandwidth is this rank's part of the link. Axes with the same `port` share a rank's
    physical port. Messages between racks also pass an uplink; `uplink_bytes_per_s` is this rank's part of the uplink.
    `leaves` and `enters` are indices of links that ranks share: those that the messages of this rank pass after its
    wire, and those that messages to this rank pass before its wire, each in this order.
    """

    link: Link
    port: int
    uplink_bytes_per_s: float | None = None
    leaves: tuple[int, ...] = ()
    enters: tuple[int, ...] = ()


class StepMessage(NamedTuple):
    """One message of a step: its axis, its receiver, and the receiver's queue.

    `peer` is the receiver's rank, by which messages of several operations share a connection. It differs from `rank` if
    one rank stands for all.
    """

    axis: int
    rank: int
    queue: int
    peer: int


class TimedStep(NamedTuple):
    """The parts of a move that cost time. A step without `sends` and `takes` is a local copy."""

    chunks: int
    sends: tuple[StepMessage, ...]
    takes: tuple[int, ...]  # the queues from each of which the step takes one message
    axis: int  # the axis whose link gives the speed of writing or encoding; -1 if the step costs no such time
    carried: float = 1.0  # encoded bytes / bytes of the chunks


def last_end(
    programs: Sequence[Sequence[TimedStep]],
    ways: Sequence[Sequence[Way]],
    chunk_bytes: float,
    segments: int,
    shared_bytes_per_s: Sequence[float] = (),
) -> float:
    """Return the time in seconds at which the last rank is done with all segments.

    Args:
        programs: the steps of each rank.
        ways: for each rank, its Way on each axis.
        chunk_bytes: the size of a chunk; all chunks have one size.
        segments: the number of pieces that run through the programs.
        shared_bytes_per_s: the rate of each link that ranks share. Messages pass it in the order in which their first
            bytes reach it.
    """
    return ends_of([TimedOperation(programs, ways, chunk_bytes, segments)], shared_bytes_per_s)[0]


class TimedOperation(NamedTuple):
    """An operation that all ranks start at `start_s`; the other fields are the arguments of `last_end`."""

    programs: Sequence[Sequence[TimedStep]]
    ways: Sequence[Sequence[Way]]
    chunk_bytes: float
    segments: int
    start_s: float = 0.0


def ends_of(operations: Sequence[TimedOperation], shared_bytes_per_s: Sequence[float] = ()) -> list[float]:
    """Return the time in seconds at which the last rank is done with each operation, while all are in flight.

    Args:
        operations: the operations of the same ranks, the oldest first.
        shared_bytes_per_s: see `last_end`.
    """
    return _Run(operations, shared_bytes_per_s).ends()


class _Lane:
    """One of the lanes in which a rank runs the segments of an operation."""

    __slots__ = ("at", "operation", "segment")

    def __init__(self, operation: int, segment: int) -> None:
        self.operation = operation
        self.segment = segment
        self.at = 0


class _Rank:
    """One rank's clock, ports and lanes."""

    __slots__ = (
        "arrived",
        "has_ended_segment",
        "in_free",
        "in_handled",
        "lanes",
        "now",
        "out_free",
        "out_handled",
        "queues",
        "uplink_free",
    )

    def __init__(self, ports: int, segments: Sequence[int]) -> None:
        self.now = 0.0
        # For each port: when its wire is free, and when it has handled its last message.
        self.out_free, self.out_handled = [0.0] * ports, [0.0] * ports
        self.in_free, self.in_handled = [0.0] * ports, [0.0] * ports
        self.uplink_free = 0.0
        self.has_ended_segment = False  # in the present call
        self.lanes: list[_Lane] = []  # of the operations that have started, the oldest operation and segment first
        # For each operation, segment and queue: when its messages arrived.
        self.arrived: list[list[dict[int, deque[float]]]] = [[{} for _ in range(count)] for count in segments]
        self.queues = [PortQueue() for _ in range(ports)]


class _Costs(NamedTuple):
    """The constants of a Way, unpacked at once in the innermost loops."""

    port: int
    latency_s: float
    overhead_s: float
    bytes_per_s: float
    reduce_bytes_per_s: float
    uplink_bytes_per_s: float | None
    leaves: tuple[int, ...]
    enters: tuple[int, ...]

    @classmethod
    def of(cls, way: Way) -> "_Costs":
        link = way.link
        rates = link.bandwidth_bytes_per_s, link.reduce_bytes_per_s, way.uplink_bytes_per_s
        return cls(way.port, link.latency_s, link.overhead_s, *rates, way.leaves, way.enters)


class _Start(NamedTuple):
    """An event: a rank starts an operation."""

    operation: int


class _WireFree(NamedTuple):
    """An event: the wire of a rank's port is free for the next of its waiting messages."""

    port: int


class _Run:
    def __init__(self, operations: Sequence[TimedOperation], shared_bytes_per_s: Sequence[float]) -> None:
        every_way = [own for each in operations for own in each.ways]
        # Ranks usually have the same ways, as the same objects.
        distinct = {id(own): own for own in every_way}
        ports = max((way.port for own in distinct.values() for way in own), default=0) + 1
        known = {each: tuple(map(_Costs.of, own)) for each, own in distinct.items()}
        self.operations = operations
        self.lanes = [min(each.segments, MOST_LANES) for each in operations]
        ranks = max(len(each.programs) for each in operations)
        self.ranks = [_Rank(ports, [each.segments for each in operations]) for _ in range(ranks)]
        self.costs = [[known[id(own)] for own in each.ways] for each in operations]
        self.is_alone = len(operations) == 1
        self.shared_bytes_per_s = shared_bytes_per_s
        self.shared_free = [0.0] * len(shared_bytes_per_s)
        self.ended = [each.start_s for each in operations]
        # (time, the order of equal times, a number that keeps the order of the rest, rank, what happens; None: the rank
        # continues)
        self.events: list[tuple[float, int, int, int, TimedMessage | _Start | _WireFree | None]] = []
        self.count = 0

    def ends(self) -> list[float]:
        for operation, each in enumerate(self.operations):
            for index in range(len(each.programs)):
                self._push(each.start_s, index, _Start(operation))
        while self.events:
            time, _, _, index, what = heappop(self.events)
            rank = self.ranks[index]
            if isinstance(what, TimedMessage):
                if what.left:
                    self._pass_shared(what)
                else:
                    self._deliver(time, what)
                continue
            if isinstance(what, _WireFree):
                self._send_next(index, what.port)
                continue
            if what is not None:
                rank.lanes += [_Lane(what.operation, segment) for segment in range(self.lanes[what.operation])]
                rank.lanes.sort(key=_age_of)
            if time >= rank.now:
                rank.now = time
                self._work(index)
        # The representative of ranks that cut their parts differently may wait for messages that never come.
        return [max(rank.now for rank in self.ranks)] if self.is_alone else self.ended

    def _push(self, time: float, rank: int, what: TimedMessage | _Start | _WireFree | None) -> None:
        self.count += 1
        # The messages of several operations reach a port in the same order at all ranks, whose events are in turn.
        last = 0 if self.is_alone else len(self.operations)
        order = what.operation if isinstance(what, TimedMessage) else last
        heappush(self.events, (time, order, self.count, rank, what))

    def _pass_shared(self, message: TimedMessage) -> None:
        """Pass a message through the next links that it shares with other messages, at the time of its first byte.

        A link is busy for the message's bytes at its own rate, so that several slower wires together can fill it. It
        forwards while it receives: from then on, the bytes follow each other at the slowest rate that they have met.
        """
        time = message.first_s
        while message.left and message.first_s <= time:
            index = message.left[0]
            message.left = message.left[1:]
            busy_s = message.size_bytes / self.shared_bytes_per_s[index]
            free = self.shared_free[index] = max(message.first_s, self.shared_free[index]) + busy_s
            message.last_s = max(message.last_s, free)
            message.slowest_s = max(message.slowest_s, busy_s)
            message.first_s = message.last_s - message.slowest_s
        self._push(message.first_s if message.left else message.last_s, message.to, message)

    def _deliver(self, time: float, message: TimedMessage) -> None:
        """Pass a message through the receiver's port, and schedule the receiver's next event after it."""
        index = message.to
        rank, way = self.ranks[index], self.costs[message.operation][index][message.axis]
        port = way.port
        begun = max(rank.in_free[port], message.first_s)
        through = max(time, begun + message.size_bytes / way.bytes_per_s)
        rank.in_free[port] = through
        there = max(through, rank.in_handled[port] + way.overhead_s)
        rank.in_handled[port] = there
        rank.arrived[message.operation][message.segment].setdefault(message.queue, deque()).append(there)
        self._push(max(there, rank.now), index, None)

    def _work(self, index: int) -> None:
        """Run all steps that a rank can run now. After a step that takes time, schedule the rest for its end."""
        rank = self.ranks[index]
        for lane in rank.lanes:
            if self._run_lane(index, lane):
                self._push(rank.now, index, None)
                break
        if rank.has_ended_segment:
            rank.has_ended_segment = False
            self._sort_lanes(rank)

    def _run_lane(self, index: int, lane: _Lane) -> bool:
        """Run the steps of a lane that a rank can run now; return whether the last of them takes time."""
        rank, operation = self.ranks[index], lane.operation
        whole, ways, arrived = self.operations[operation], self.costs[operation][index], rank.arrived[operation]
        steps = whole.programs[index]
        while lane.segment < whole.segments:
            if lane.at == len(steps):
                lane.segment += self.lanes[operation]
                lane.at = 0
                rank.has_ended_segment = True
                continue
            step = steps[lane.at]
            if step.takes and not _take(arrived[lane.segment], step.takes, rank.now):
                break
            lane.at += 1
            if step.axis >= 0:
                rank.now += step.chunks * whole.chunk_bytes / ways[step.axis].reduce_bytes_per_s
            if lane.at == len(steps) and rank.now > self.ended[operation]:
                self.ended[operation] = rank.now
            if step.sends:
                self._send(index, lane, step)
            if step.axis >= 0:
                return True
        return False

    def _sort_lanes(self, rank: _Rank) -> None:
        rank.lanes = [lane for lane in rank.lanes if lane.segment < self.operations[lane.operation].segments]
        rank.lanes.sort(key=_age_of)

    def _send(self, index: int, lane: _Lane, step: TimedStep) -> None:
        rank, operation = self.ranks[index], lane.operation
        size_bytes = step.chunks * self.operations[operation].chunk_bytes * step.carried
        costs = self.costs[operation]
        for axis, to, at_receiver, peer in step.sends:
            way = costs[index][axis]
            handled = max(rank.now, rank.out_handled[way.port]) + way.overhead_s
            rank.out_handled[way.port] = handled
            message = TimedMessage(to, operation, lane.segment, at_receiver, axis, size_bytes)
            # The latency is that of the whole way. It comes before the shared links, so that messages queue for a
            # receiver's link in the order in which they reach it.
            message.left = way.leaves + costs[to][axis].enters
            free = rank.out_free[way.port]
            if self.is_alone:
                self._leave(rank, way, message, max(handled, free))
                continue
            message.first_s, message.peer = handled, peer
            queue = rank.queues[way.port]
            was_idle = queue.is_idle()
            queue.put(message)
            if was_idle and free <= handled:
                self._send_next(index, way.port)
            elif not queue.is_awaited:
                queue.is_awaited = True
                self._push(free, index, _WireFree(way.port))

    def _send_next(self, index: int, port: int) -> None:
        """Put the next message of a port on its wire, which is free."""
        rank = self.ranks[index]
        queue = rank.queues[port]
        queue.is_awaited = False
        message = queue.on_free()
        if message is None:
            return
        way = self.costs[message.operation][index][message.axis]
        queue.on_wire = message
        self._leave(rank, way, message, max(rank.out_free[port], message.first_s))
        if not queue.is_idle():
            queue.is_awaited = True
            self._push(rank.out_free[port], index, _WireFree(port))

    def _leave(self, rank: _Rank, way: _Costs, message: TimedMessage, start: float) -> None:
        """Put a message on the wire of its port at `start`."""
        wire_s = message.size_bytes / way.bytes_per_s
        end = start + wire_s
        rank.out_free[way.port] = end
        if way.uplink_bytes_per_s is not None:
            rank.uplink_free = max(start, rank.uplink_free) + message.size_bytes / way.uplink_bytes_per_s
            end = max(end, rank.uplink_free)
        message.first_s, message.last_s, message.slowest_s = start + way.latency_s, end + way.latency_s, wire_s
        self._push(message.first_s if message.left else message.last_s, message.to, message)


def _take(arrived: dict[int, deque[float]], queues: tuple[int, ...], now: float) -> bool:
    """Take one message from each queue, if all have one that has arrived by now."""
    for queue in queues:
        waiting = arrived.get(queue)
        if not waiting or waiting[0] > now:
            return False
    for queue in queues:
        arrived[queue].popleft()
    return True


def _age_of(lane: _Lane) -> tuple[int, int]:
    return lane.operation, lane.segment
