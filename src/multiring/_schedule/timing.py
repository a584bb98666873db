"""Simulate ranks that run several segments at once: the events in order of time.

A port handles a message, then puts it on the wire while it handles the next message. The message then passes the links
that ranks share, if there are any, and travels for the latency. At the receiver it passes the wire, then the port. A
rank runs its segments as lanes: it serves the oldest segment that can proceed, and does one thing at a time.
docs/algorithms.md has the model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

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
    """One message of a step: its axis, its receiver, and the receiver's queue."""

    axis: int
    rank: int
    queue: int


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
    return _Run(programs, ways, chunk_bytes, segments, shared_bytes_per_s).end()


class _Lane:
    """One of the lanes in which a rank runs segments."""

    __slots__ = ("at", "segment")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.at = 0


class _Rank:
    """One rank's clock, ports and lanes."""

    __slots__ = ("arrived", "in_free", "in_handled", "lanes", "now", "out_free", "out_handled", "steps", "uplink_free")

    def __init__(self, steps: Sequence[TimedStep], ports: int, lanes: int, segments: int) -> None:
        self.steps = steps
        self.now = 0.0
        # For each port: when its wire is free, and when it has handled its last message.
        self.out_free, self.out_handled = [0.0] * ports, [0.0] * ports
        self.in_free, self.in_handled = [0.0] * ports, [0.0] * ports
        self.uplink_free = 0.0
        self.lanes = [_Lane(segment) for segment in range(lanes)]
        # For each segment and queue: when its messages arrived.
        self.arrived: list[dict[int, deque[float]]] = [{} for _ in range(segments)]


class _Message:
    """A message under way: when its first and its last byte are, or will be, where it is.

    `slowest_s` is its time on the slowest link that it has passed.
    """

    __slots__ = ("axis", "first_s", "last_s", "left", "queue", "segment", "size_bytes", "slowest_s", "to")

    def __init__(self, to: int, segment: int, queue: int, axis: int, size_bytes: float) -> None:
        self.to = to
        self.segment = segment
        self.queue = queue
        self.axis = axis
        self.size_bytes = size_bytes
        self.left: tuple[int, ...] = ()  # the shared links that it has not passed
        self.first_s = self.last_s = self.slowest_s = 0.0


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


class _Run:
    def __init__(
        self,
        programs: Sequence[Sequence[TimedStep]],
        ways: Sequence[Sequence[Way]],
        chunk_bytes: float,
        segments: int,
        shared_bytes_per_s: Sequence[float],
    ) -> None:
        ports = max((way.port for own in ways for way in own), default=0) + 1
        self.lanes = min(segments, MOST_LANES)
        self.segments = segments
        self.ranks = [_Rank(steps, ports, self.lanes, segments) for steps in programs]
        # Ranks usually have the same ways, as the same objects.
        known = {id(own): tuple(map(_Costs.of, own)) for own in {id(own): own for own in ways}.values()}
        self.costs = [known[id(own)] for own in ways]
        self.chunk_bytes = chunk_bytes
        self.shared_bytes_per_s = shared_bytes_per_s
        self.shared_free = [0.0] * len(shared_bytes_per_s)
        # (time, a number that keeps the order of equal times, rank, its message, or None if the rank continues)
        self.events: list[tuple[float, int, int, _Message | None]] = []
        self.count = 0

    def end(self) -> float:
        for index in range(len(self.ranks)):
            self._push(0.0, index, None)
        while self.events:
            time, _, index, message = heappop(self.events)
            rank = self.ranks[index]
            if message is not None:
                if message.left:
                    self._pass_shared(message)
                else:
                    self._deliver(time, message)
            elif time >= rank.now:
                rank.now = time
                self._work(index)
        return max(rank.now for rank in self.ranks)

    def _push(self, time: float, rank: int, message: _Message | None) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, rank, message))

    def _pass_shared(self, message: _Message) -> None:
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

    def _deliver(self, time: float, message: _Message) -> None:
        """Pass a message through the receiver's port, and schedule the receiver's next event after it."""
        index = message.to
        rank, way = self.ranks[index], self.costs[index][message.axis]
        port = way.port
        begun = max(rank.in_free[port], message.first_s)
        through = max(time, begun + message.size_bytes / way.bytes_per_s)
        rank.in_free[port] = through
        there = max(through, rank.in_handled[port] + way.overhead_s)
        rank.in_handled[port] = there
        rank.arrived[message.segment].setdefault(message.queue, deque()).append(there)
        self._push(max(there, rank.now), index, None)

    def _work(self, index: int) -> None:
        """Run all steps that a rank can run now. After a step that takes time, schedule the rest for its end."""
        rank, ways = self.ranks[index], self.costs[index]
        steps, ended = rank.steps, False
        for lane in rank.lanes:
            while lane.segment < self.segments:
                if lane.at == len(steps):
                    lane.segment += self.lanes
                    lane.at = 0
                    ended = True
                    continue
                step = steps[lane.at]
                if step.takes and not _take(rank.arrived[lane.segment], step.takes, rank.now):
                    break
                lane.at += 1
                if step.axis >= 0:
                    rank.now += step.chunks * self.chunk_bytes / ways[step.axis].reduce_bytes_per_s
                if step.sends:
                    self._send(rank, ways, lane.segment, step)
                if step.axis >= 0:
                    self._push(rank.now, index, None)
                    if ended:
                        rank.lanes.sort(key=_segment_of)
                    return
        if ended:
            rank.lanes.sort(key=_segment_of)

    def _send(self, rank: _Rank, ways: Sequence[_Costs], segment: int, step: TimedStep) -> None:
        size_bytes = step.chunks * self.chunk_bytes * step.carried
        for axis, to, queue in step.sends:
            port, latency_s, overhead_s, bytes_per_s, _, uplink_bytes_per_s, leaves, _ = ways[axis]
            handled = max(rank.now, rank.out_handled[port]) + overhead_s
            rank.out_handled[port] = handled
            start = max(handled, rank.out_free[port])
            wire_s = size_bytes / bytes_per_s
            end = start + wire_s
            rank.out_free[port] = end
            if uplink_bytes_per_s is not None:
                rank.uplink_free = max(start, rank.uplink_free) + size_bytes / uplink_bytes_per_s
                end = max(end, rank.uplink_free)
            # The latency is that of the whole way. It comes before the shared links, so that messages queue for a
            # receiver's link in the order in which they reach it.
            message = _Message(to, segment, queue, axis, size_bytes)
            message.first_s, message.last_s, message.slowest_s = start + latency_s, end + latency_s, wire_s
            message.left = leaves + self.costs[to][axis].enters
            self._push(message.first_s if message.left else message.last_s, to, message)


def _take(arrived: dict[int, deque[float]], queues: tuple[int, ...], now: float) -> bool:
    """Take one message from each queue, if all have one that has arrived by now."""
    for queue in queues:
        waiting = arrived.get(queue)
        if not waiting or waiting[0] > now:
            return False
    for queue in queues:
        arrived[queue].popleft()
    return True


def _segment_of(lane: _Lane) -> int:
    return lane.segment
