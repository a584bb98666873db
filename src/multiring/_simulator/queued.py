"""Price a schedule on ranks that queue for shared links, or run several segments, by fewer and cheaper events.

This is a lowering of `seconds_of_all` with the same result, for schedules whose ranks all take the same steps up to a
rotation. It has the events of `multiring._schedule.timing` in the same order, for one operation. The differences save
time only: events of one time are kept in one list, costs are divided out before the run, all ranks share one program,
and a rank that is busy is not woken.
"""

# ruff: noqa: FURB136, PLR1730 -- calls of `max` in the innermost functions would take a tenth of the time

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from multiring._schedule import Schedule, Way
from multiring._schedule.price import representative
from multiring._schedule.timing import MOST_LANES, TimedStep
from multiring._simulator.lockstep import distinct_ways
from multiring._simulator.rotation import peers_of


def seconds_in_queues(
    schedule: Schedule, size_bytes: float, ways: Sequence[Sequence[Way]], segments: int, rates: Sequence[float]
) -> float:
    """Return the seconds until the last rank is done; the arguments are those of `seconds_of_all`.

    Args:
        schedule: a schedule that `is_rotated`.
        size_bytes: see `seconds_of_all`.
        ways: see `seconds_of_all`.
        segments: see `seconds_of_all`.
        rates: the rates of the shared links in bytes/s.
    """
    return _Run(schedule, size_bytes / schedule.frame.blocks / segments, ways, segments, rates).end()


class _Send(NamedTuple):
    """A message of a step, with the costs of its sender."""

    port: int
    overhead_s: float
    wire_s: float
    latency_s: float
    uplink_s: float  # 0 without an uplink
    routes: list["_Route"]  # by sender


class _Route(NamedTuple):
    """Where a message of a rank goes, with the costs of its receiver."""

    to: int
    queue: int
    port: int  # among the ports of all ranks
    wire_s: float
    overhead_s: float
    links: tuple[tuple[int, float], ...]  # the shared links, and how long the message occupies each


class _Step(NamedTuple):
    """A step of all ranks with the same ways."""

    takes: tuple[int, ...]
    busy_s: float  # negative if the step takes no time
    sends: tuple[_Send, ...]


class _Message:
    """A message under way; the fields are those of `TimedMessage`."""

    __slots__ = ("first_s", "key", "last_s", "passed", "route", "slowest_s")

    def __init__(self, route: _Route, key: int, first_s: float, last_s: float, wire_s: float) -> None:
        self.route = route
        self.key = key  # of the receiver's queue for this segment
        self.passed = 0  # of the route's links
        self.first_s = first_s
        self.last_s = last_s
        self.slowest_s = wire_s


class _Run:
    """The events of all ranks; most lists have an entry for each rank, or for each port of each rank."""

    def __init__(
        self,
        schedule: Schedule,
        chunk_bytes: float,
        ways: Sequence[Sequence[Way]],
        segments: int,
        rates: Sequence[float],
    ) -> None:
        ranks = schedule.ranks
        self._ports = 1 + max(way.port for own in distinct_ways(ways)[0] for way in own)
        self._programs = _programs(schedule, chunk_bytes, ways, rates, self._ports)
        self._length = len(representative(schedule))
        self._segments, self._stride = segments, min(segments, MOST_LANES)
        self._queues = max(schedule.grid) * len(schedule.grid)
        self._now = [0.0] * ranks
        # Each lane is its segment and the step at which it is, the oldest segment first.
        self._lanes = [[[segment, 0] for segment in range(self._stride)] for _ in range(ranks)]
        self._arrived: list[dict[int, deque[float]]] = [{} for _ in range(ranks)]
        self._uplink_free = [0.0] * ranks
        self._out_free, self._out_handled, self._in_free, self._in_handled = (
            [0.0] * (ranks * self._ports) for _ in range(4)
        )
        self._link_free = [0.0] * len(rates)
        # What happens at a time, in order: a rank continues, or a message reaches its next link or its receiver.
        self._events: dict[float, list[int | _Message]] = {0.0: list(range(ranks))}
        self._times = [0.0]

    def end(self) -> float:
        now = self._now
        while self._times:
            time = heappop(self._times)
            for event in self._events[time]:  # grows while it is read
                if event.__class__ is int:
                    if time >= now[event]:
                        self._work(event, time)
                elif event.passed < len(event.route.links):  # type: ignore[union-attr] # no int
                    self._pass_shared(event, time)  # type: ignore[arg-type] # no int
                else:
                    self._deliver(event, time)  # type: ignore[arg-type] # no int
            del self._events[time]
        return max(now)

    def _push(self, time: float, event: "int | _Message") -> None:
        together = self._events.get(time)
        if together is None:
            self._events[time] = [event]
            heappush(self._times, time)
        else:
            together.append(event)

    def _pass_shared(self, message: _Message, time: float) -> None:
        """Pass a message through its next links; see `timing`."""
        links, free = message.route.links, self._link_free
        while message.first_s <= time and message.passed < len(links):
            link, busy_s = links[message.passed]
            message.passed += 1
            through = (message.first_s if message.first_s > free[link] else free[link]) + busy_s
            free[link] = through
            if through > message.last_s:
                message.last_s = through
            if busy_s > message.slowest_s:
                message.slowest_s = busy_s
            message.first_s = message.last_s - message.slowest_s
        self._push(message.first_s if message.passed < len(links) else message.last_s, message)

    def _deliver(self, message: _Message, time: float) -> None:
        """Pass a message through the receiver's port, and wake the receiver after it."""
        to, _, port, wire_s, overhead_s, _ = message.route
        through = self._in_free[port]
        through = (message.first_s if message.first_s > through else through) + wire_s
        if through < time:
            through = time
        self._in_free[port] = through
        there = self._in_handled[port] + overhead_s
        if through > there:
            there = through
        self._in_handled[port] = there
        arrived = self._arrived[to]
        waiting = arrived.get(message.key)
        if waiting is None:
            arrived[message.key] = deque((there,))
        else:
            waiting.append(there)
        now = self._now[to]
        if there > now:
            self._push(there, to)
        elif now == time:
            self._push(now, to)
        # Otherwise the rank is busy until `now`, and an event then is scheduled already.

    def _work(self, rank: int, time: float) -> None:
        """Run all steps that a rank can run now. After a step that takes time, schedule the rest for its end."""
        self._now[rank] = time
        lanes = self._lanes[rank]
        has_ended = False
        for lane in lanes:
            before = lane[0]
            takes_time = self._run_lane(rank, lane)
            has_ended = has_ended or lane[0] != before
            if takes_time:
                self._push(self._now[rank], rank)
                break
        if has_ended:
            self._lanes[rank] = sorted(lane for lane in lanes if lane[0] < self._segments)

    def _run_lane(self, rank: int, lane: list[int]) -> bool:
        """Run the steps of a lane that a rank can run now; return whether the last of them takes time."""
        segment, at = lane
        steps, arrived, now = self._programs[rank], self._arrived[rank], self._now[rank]
        takes_time = False
        while not takes_time and segment < self._segments:
            if at == self._length:
                segment, at = segment + self._stride, 0
                continue
            takes, busy_s, sends = steps[at]
            base = segment * self._queues
            if takes:
                waiting = arrived.get(base + takes[0])
                if not waiting or waiting[0] > now:
                    break
                if len(takes) == 1:
                    waiting.popleft()
                elif not _take(arrived, base, takes, now):
                    break
            at += 1
            if busy_s >= 0:
                now += busy_s
                takes_time = True
            for send in sends:
                self._send(rank, send, base, now)
        lane[:] = segment, at
        self._now[rank] = now
        return takes_time

    def _send(self, rank: int, send: _Send, base: int, now: float) -> None:
        port, overhead_s, wire_s, latency_s, uplink_s, routes = send
        route = routes[rank]
        at = rank * self._ports + port
        start = self._out_handled[at]
        start = (now if now > start else start) + overhead_s
        self._out_handled[at] = start
        if self._out_free[at] > start:
            start = self._out_free[at]
        end = start + wire_s
        self._out_free[at] = end
        if uplink_s:
            free = self._uplink_free[rank] = max(start, self._uplink_free[rank]) + uplink_s
            end = max(end, free)
        message = _Message(route, base + route.queue, start + latency_s, end + latency_s, wire_s)
        self._push(message.first_s if route.links else message.last_s, message)


def _take(arrived: dict[int, deque[float]], base: int, queues: tuple[int, ...], now: float) -> bool:
    """Take one message from each queue of the segment at `base`, if all have one that has arrived by now."""
    found = []
    for queue in queues:
        waiting = arrived.get(base + queue)
        if not waiting or waiting[0] > now:
            return False
        found.append(waiting)
    for waiting in found:
        waiting.popleft()
    return True


def _programs(
    schedule: Schedule, chunk_bytes: float, ways: Sequence[Sequence[Way]], rates: Sequence[float], ports: int
) -> list[list[_Step]]:
    """Return the steps of each rank. Ranks that have the same ways, as the same object, have the same list."""
    steps = representative(schedule)
    kinds, kind_of_rank = distinct_ways(ways)
    sizes = {
        (message.axis, message.queue, step.chunks * chunk_bytes * step.carried)
        for step in steps
        for message in step.sends
    }
    routes = {key: _routes(schedule, key, ways, rates, ports) for key in sizes}
    programs = []
    for own in kinds:
        known = {step: _step_of(step, chunk_bytes, own, routes) for step in set(steps)}
        programs.append([known[step] for step in steps])
    return [programs[kind] for kind in kind_of_rank.tolist()]


def _step_of(
    step: TimedStep, chunk_bytes: float, own: Sequence[Way], routes: dict[tuple[int, int, float], list[_Route]]
) -> _Step:
    size_bytes = step.chunks * chunk_bytes * step.carried
    sends = []
    for axis, _, queue, _ in step.sends:
        link, uplink = own[axis].link, own[axis].uplink_bytes_per_s
        sends.append(
            _Send(
                own[axis].port,
                link.overhead_s,
                size_bytes / link.bandwidth_bytes_per_s,
                link.latency_s,
                0.0 if uplink is None else size_bytes / uplink,
                routes[axis, queue, size_bytes],
            )
        )
    busy_s = step.chunks * chunk_bytes / own[step.axis].link.reduce_bytes_per_s if step.axis >= 0 else -1.0
    return _Step(step.takes, busy_s, tuple(sends))


def _routes(
    schedule: Schedule,
    key: tuple[int, int, float],
    ways: Sequence[Sequence[Way]],
    rates: Sequence[float],
    ports: int,
) -> list[_Route]:
    """Return where each rank's message of an axis, a receiver's queue and a size goes."""
    axis, queue, size_bytes = key
    busy_s = [size_bytes / rate for rate in rates]
    found = []
    for rank, to in enumerate(peers_of(schedule, axis, queue)):
        way = ways[to][axis]
        links = tuple((link, busy_s[link]) for link in ways[rank][axis].leaves + way.enters)
        wire_s = size_bytes / way.link.bandwidth_bytes_per_s
        found.append(_Route(to, queue, to * ports + way.port, wire_s, way.link.overhead_s, links))
    return found
