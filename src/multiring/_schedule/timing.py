"""Simulate several ranks that run several segments at once: the events in order of time.

A port handles a message, then puts it on the wire while it handles the next message. The message then passes the uplink
between racks, if there is one, and travels for the latency. At the receiver it passes the wire, then the port. A rank
runs its segments as lanes: it serves the oldest segment that can proceed, and does one thing at a time.
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
    """The links that a message along an axis passes.

    `link` has the constants; its bandwidth is this rank's part of the link. Axes with the same `port` share a rank's
    physical port. Messages between racks also pass an uplink; `uplink_bytes_per_s` is this rank's part of the uplink.
    """

    link: Link
    port: int
    uplink_bytes_per_s: float | None = None


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


def last_end(programs: Sequence[Sequence[TimedStep]], ways: Sequence[Way], chunk_bytes: float, segments: int) -> float:
    """Return the time in seconds at which the last rank is done with all segments.

    All chunks have one size.
    """
    run = _Run(programs, ways, chunk_bytes, segments)
    return run.end()


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


class _Run:
    def __init__(
        self, programs: Sequence[Sequence[TimedStep]], ways: Sequence[Way], chunk_bytes: float, segments: int
    ) -> None:
        ports = max((way.port for way in ways), default=0) + 1
        self.lanes = min(segments, MOST_LANES)
        self.segments = segments
        self.ranks = [_Rank(steps, ports, self.lanes, segments) for steps in programs]
        self.ways = ways
        self.chunk_bytes = chunk_bytes
        # (time, a number that keeps the order of equal times, rank, message: (segment, queue, axis, bytes) or None)
        self.events: list[tuple[float, int, int, tuple[int, int, int, float] | None]] = []
        self.count = 0

    def end(self) -> float:
        for index in range(len(self.ranks)):
            self._push(0.0, index, None)
        while self.events:
            time, _, index, message = heappop(self.events)
            rank = self.ranks[index]
            if message is not None:
                self._deliver(time, index, message)
            elif time >= rank.now:
                rank.now = time
                self._work(index)
        return max(rank.now for rank in self.ranks)

    def _push(self, time: float, rank: int, message: tuple[int, int, int, float] | None) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, rank, message))

    def _deliver(self, time: float, index: int, message: tuple[int, int, int, float]) -> None:
        """Pass a message through the receiver's port, and schedule the receiver's next event after it."""
        segment, queue, axis, size_bytes = message
        rank, way = self.ranks[index], self.ways[axis]
        link = way.link
        through = max(time, rank.in_free[way.port] + size_bytes / link.bandwidth_bytes_per_s)
        rank.in_free[way.port] = through
        there = max(through, rank.in_handled[way.port] + link.overhead_s)
        rank.in_handled[way.port] = there
        rank.arrived[segment].setdefault(queue, deque()).append(there)
        self._push(max(there, rank.now), index, None)

    def _work(self, index: int) -> None:
        """Run all steps that a rank can run now. After a step that takes time, schedule the rest for its end."""
        rank = self.ranks[index]
        for lane in rank.lanes:
            while lane.segment < self.segments:
                if lane.at == len(rank.steps):
                    lane.segment += self.lanes
                    lane.at = 0
                    continue
                step = rank.steps[lane.at]
                arrived = rank.arrived[lane.segment]
                if any(not arrived.get(queue) or arrived[queue][0] > rank.now for queue in step.takes):
                    break
                for queue in step.takes:
                    arrived[queue].popleft()
                lane.at += 1
                if step.axis >= 0:
                    rank.now += step.chunks * self.chunk_bytes / self.ways[step.axis].link.reduce_bytes_per_s
                if step.sends:
                    self._send(rank, lane.segment, step)
                if step.axis >= 0:
                    self._sort(rank)
                    self._push(rank.now, index, None)
                    return
        self._sort(rank)

    def _sort(self, rank: _Rank) -> None:
        rank.lanes.sort(key=_segment_of)

    def _send(self, rank: _Rank, segment: int, step: TimedStep) -> None:
        size_bytes = step.chunks * self.chunk_bytes * step.carried
        for axis, to, queue in step.sends:
            way = self.ways[axis]
            link = way.link
            handled = max(rank.now, rank.out_handled[way.port]) + link.overhead_s
            rank.out_handled[way.port] = handled
            start = max(handled, rank.out_free[way.port])
            end = start + size_bytes / link.bandwidth_bytes_per_s
            rank.out_free[way.port] = end
            if way.uplink_bytes_per_s is not None:
                rank.uplink_free = max(start, rank.uplink_free) + size_bytes / way.uplink_bytes_per_s
                end = max(end, rank.uplink_free)
            self._push(end + link.latency_s, to, (segment, queue, axis, size_bytes))


def _segment_of(lane: _Lane) -> int:
    return lane.segment
