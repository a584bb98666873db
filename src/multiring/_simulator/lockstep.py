"""Price a schedule on ranks with unequal links, step by step for all ranks at once.

This is a lowering of `seconds_of_all` with the same result. All ranks of a grid take the same steps up to a rotation of
each axis, so a step of all ranks is a few operations on arrays with one entry for each rank. That is exact as long as
the messages reach every port in the order in which the steps take them. If some rank is so much faster than others that
messages of a later step reach a port before those of an earlier one, this module gives up.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from multiring._schedule import Schedule, Way
from multiring._schedule.price import representative
from multiring._simulator.rotation import is_rotated, offset_of

_LEAVES, _ENTERS, _PORT, _LINK, _UPLINK = map(attrgetter, ("leaves", "enters", "port", "link", "uplink_bytes_per_s"))
_CONSTANTS = tuple(map(attrgetter, ("latency_s", "overhead_s", "bandwidth_bytes_per_s", "reduce_bytes_per_s")))

_Times = NDArray[np.float64]  # (ranks,), by position on the grid


@dataclass(frozen=True, slots=True)
class _Axis:
    """The constants of all ranks' links along an axis; each array has shape (ranks,), by position on the grid."""

    port: int
    latency_s: _Times
    overhead_s: _Times
    wire_s_per_byte: _Times
    reduce_s_per_byte: _Times
    uplink_s_per_byte: _Times | None  # 0 for a rank without an uplink


@dataclass(frozen=True, slots=True)
class _Message:
    """One message to each rank: when its first and its last byte reach the rank's port."""

    queue: int
    axis: int
    size_bytes: float
    first_s: _Times
    last_s: _Times


@dataclass(slots=True)
class _Port:
    """One port of each rank."""

    out_free: _Times
    out_handled: _Times
    in_free: _Times
    in_handled: _Times
    reached: _Times  # when the last message that passed inwards had reached the port
    coming: list[_Message] = field(default_factory=list)


def seconds_in_lockstep(schedule: Schedule, size_bytes: float, ways: Sequence[Sequence[Way]]) -> float | None:
    """Return the seconds until the last rank is done with the whole buffer in one piece.

    Return None if the schedule or the links do not have the form that this lowering evaluates.
    """
    axes = _axes_of(schedule, ways)
    if axes is None:
        return None
    return _Lockstep(schedule, size_bytes / schedule.frame.blocks, axes).end()


def _axes_of(schedule: Schedule, ways: Sequence[Sequence[Way]]) -> list[_Axis] | None:
    """Return the constants of each axis; None if ranks are not alike but for the constants of their links."""
    if not is_rotated(schedule):
        return None
    # Tens of thousands of hosts have ways of their own, so all loops over them run in C.
    kinds, kind_of_rank = distinct_ways(ways)
    kind_of = kind_of_rank[np.asarray(schedule.order)]
    own_ways = list(chain.from_iterable(kinds))
    if any(map(_LEAVES, own_ways)) or any(map(_ENTERS, own_ways)):
        return None
    found: list[_Axis] = []
    links: list[object] = []
    latency_s = overhead_s = bytes_per_s = reduce_bytes_per_s = np.empty(0)
    for axis in range(len(kinds[0])):
        of_axis = own_ways[axis :: len(kinds[0])]
        ports = set(map(_PORT, of_axis))
        if len(ports) > 1:
            return None
        before: list[object] = links
        links = list(map(_LINK, of_axis))
        if links != before:  # the axes between hosts usually have the same links
            latency_s, overhead_s, bytes_per_s, reduce_bytes_per_s = (
                np.fromiter(map(constant, links), float, len(links))[kind_of] for constant in _CONSTANTS
            )
        uplinks = list(map(_UPLINK, of_axis))
        uplink_s_per_byte = None
        if any(uplinks):
            uplink_s_per_byte = np.array([0.0 if each is None else 1 / each for each in uplinks])[kind_of]
        found.append(
            _Axis(ports.pop(), latency_s, overhead_s, 1 / bytes_per_s, 1 / reduce_bytes_per_s, uplink_s_per_byte)
        )
    return found


def distinct_ways(ways: Sequence[Sequence[Way]]) -> tuple[list[Sequence[Way]], NDArray[np.intp]]:
    """Return the ways that are different objects, and for each rank the index of its own among them.

    The ranks of a host usually have the same ways, as the same object.
    """
    if not ways:
        return [], np.empty(0, np.intp)
    _, first, kind_of = np.unique(
        np.fromiter(map(id, ways), np.int64, len(ways)), return_index=True, return_inverse=True
    )
    return [ways[rank] for rank in first.tolist()], kind_of


class _Lockstep:
    """All ranks, which are always at the same step."""

    def __init__(self, schedule: Schedule, chunk_bytes: float, axes: Sequence[_Axis]) -> None:
        self.schedule = schedule
        self.steps = representative(schedule)
        self.chunk_bytes = chunk_bytes
        self.axes = axes
        ranks = schedule.ranks
        self.ports = {axis.port: _Port(*np.zeros((5, ranks))) for axis in axes}
        self.uplink_free = np.zeros(ranks)
        self.now = np.zeros(ranks)
        self.arrived: dict[int, deque[_Times]] = {}
        self.wire_s: dict[int, tuple[float, _Times]] = {}

    def end(self) -> float | None:
        width = max(self.schedule.grid)
        for step in self.steps:
            for port in {self.axes[queue // width].port for queue in step.takes}:
                if not self._take_in(self.ports[port]):
                    return None
            for queue in step.takes:
                self.now = np.maximum(self.now, self.arrived[queue].popleft())
            if step.axis >= 0:
                self.now = self.now + step.chunks * self.chunk_bytes * self.axes[step.axis].reduce_s_per_byte
            for axis, _, queue, _ in step.sends:
                self._send(axis, queue, step.chunks * self.chunk_bytes * step.carried)
        return float(self.now.max())

    def _send(self, at: int, queue: int, size_bytes: float) -> None:
        """Send a message from every rank along an axis, to a queue of its receiver."""
        axis = self.axes[at]
        port = self.ports[axis.port]
        # Fresh memory takes longer than arithmetic here, so results reuse the memory of what they are made from.
        handled = np.maximum(self.now, port.out_handled)
        handled += axis.overhead_s
        port.out_handled = handled
        start = np.maximum(handled, port.out_free)
        end = start + self._wire_s(at, size_bytes)
        port.out_free = end
        if axis.uplink_s_per_byte is not None:
            passed = np.maximum(start, self.uplink_free) + size_bytes * axis.uplink_s_per_byte
            has_uplink = axis.uplink_s_per_byte > 0
            self.uplink_free = np.where(has_uplink, passed, self.uplink_free)
            end = np.where(has_uplink, np.maximum(end, passed), end)
        first, last = (
            self._moved(each + axis.latency_s, at, offset_of(self.schedule, at, queue)) for each in (start, end)
        )
        port.coming.append(_Message(queue, at, size_bytes, first, last))

    def _wire_s(self, axis: int, size_bytes: float) -> _Times:
        """Return the seconds of a message on the wires of an axis; most messages of an axis have one size."""
        known = self.wire_s.get(axis)
        if known is None or known[0] != size_bytes:
            known = self.wire_s[axis] = size_bytes, size_bytes * self.axes[axis].wire_s_per_byte
        return known[1]

    def _moved(self, times: _Times, axis: int, offset: int) -> _Times:
        """Return the values of the ranks at -`offset` along an axis: those of the senders."""
        # Positions count the first axis fastest; a numpy array counts its last axis fastest.
        grid = self.schedule.grid
        return np.roll(times.reshape(grid[::-1]), offset, axis=len(grid) - 1 - axis).ravel()

    def _take_in(self, port: _Port) -> bool:
        """Pass all messages that come to a port through it, in order; return False if one was overtaken before."""
        messages, port.coming = port.coming, []
        if len(messages) < 2 or all((one.last_s <= other.last_s).all() for one, other in pairwise(messages)):
            return all(self._pass(port, message) for message in messages)
        return self._pass_sorted(port, messages)

    def _pass(self, port: _Port, message: _Message) -> bool:
        axis = self.axes[message.axis]
        if (message.last_s < port.reached).any():
            return False
        port.reached = message.last_s
        through = np.maximum(port.in_free, message.first_s)
        through += self._wire_s(message.axis, message.size_bytes)
        port.in_free = np.maximum(message.last_s, through, out=through)
        handled = port.in_handled + axis.overhead_s
        port.in_handled = np.maximum(through, handled, out=handled)
        self.arrived.setdefault(message.queue, deque()).append(port.in_handled)
        return True

    def _pass_sorted(self, port: _Port, messages: Sequence[_Message]) -> bool:
        """Pass several messages, which reach different ranks in different orders."""
        last = np.stack([message.last_s for message in messages])
        order = np.argsort(last, axis=0, kind="stable")
        last, first, wire_s, overhead_s = (
            np.take_along_axis(values, order, axis=0)
            for values in (
                last,
                np.stack([message.first_s for message in messages]),
                np.stack([message.size_bytes * self.axes[message.axis].wire_s_per_byte for message in messages]),
                np.stack([self.axes[message.axis].overhead_s for message in messages]),
            )
        )
        if (last[0] < port.reached).any():
            return False
        port.reached = last[-1]
        there = np.empty_like(last)
        for at in range(len(messages)):
            port.in_free = np.maximum(last[at], np.maximum(port.in_free, first[at]) + wire_s[at])
            port.in_handled = np.maximum(port.in_free, port.in_handled + overhead_s[at])
            there[at] = port.in_handled
        arrived = np.empty_like(there)
        np.put_along_axis(arrived, order, there, axis=0)
        for message, times in zip(messages, arrived, strict=True):
            self.arrived.setdefault(message.queue, deque()).append(times)
        return True
