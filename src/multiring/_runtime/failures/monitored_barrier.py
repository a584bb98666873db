"""Monitored barrier: a barrier that reports the missing ranks.

Every other rank announces its arrival to rank 0 of the group, the teller. The teller decides when all ranks have
arrived, or after its time-out. It sends its decision to all ranks, including late ranks. The barrier uses control
messages only, so a failed call leaves no operation in flight, and the group stays usable.
"""

import struct
import threading
import time
from dataclasses import dataclass

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime.group.group import Group
from multiring.errors import StateError

_TELLER = 0
_COME, _HOLD, _DECIDED = 0, 1, 2
_NUMBER = struct.Struct("<q")
_HOLDING = struct.Struct("<qd")  # the call's number, and the seconds until the teller decides at the latest
# If the teller has no connection or no MonitoredBarrier yet, the announcement is lost. So each rank repeats it.
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.002, 0.05
_NEWS_S = 5.0  # the teller's decision arrives at most this long after its time-out
_MOST_TOLD = 1000  # missing ranks in a decision; a control message has room for a few more
_LONGEST_WAIT_S = 3600.0  # the longest single wait on a lock; the settings' value for "never" is too long


@dataclass(frozen=True, kw_only=True, slots=True)
class BarrierOutcome:
    """The result of a monitored barrier.

    `missing` lists the ranks of the group that had not arrived at the end, in ascending order, at most 1,000.
    `lost` gives the reason for each missing rank that died or left, on the teller only. `was_decided` is False on a
    rank that has received no decision; the missing rank is then the teller.
    """

    missing: tuple[int, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    was_decided: bool = True


class MonitoredBarrier:
    """The monitored barriers of one group on this rank.

    All ranks must call them in the same order, one at a time.

    Args:
        group: the group; every rank of it must create its own MonitoredBarrier.
    """

    def __init__(self, group: Group) -> None:
        self._ranks = group.calls.ranks
        self._rank = group.rank
        self._index = {rank: index for index, rank in enumerate(group.calls.ranks)}
        self._context = group.calls.services.context
        self._changed = threading.Condition()
        self._number = 0
        self._ended = 0  # the number of the latest call that has ended here
        self._deadline_s: float | None = None  # the deadline of the teller's current call
        self._come: dict[int, set[int]] = {}  # for each call, the ranks that have arrived
        self._decided: dict[int, tuple[int, ...]] = {}  # the missing ranks of each call; the teller omits empty entries

        self._held_until_s: dict[int, float] = {}
        self._lost: dict[int, str] = {}
        self._is_over = False
        self._id = group.calls.purpose_id("monitored barrier")
        self._control = group.calls.services.control if group.size > 1 else None
        if self._control is not None:
            self._control.add(self._id, self)

    def call(self, timeout_s: float, *, waits_for_all: bool = False) -> BarrierOutcome:
        """Wait until all ranks have arrived, or until the time-out; return the outcome.

        Args:
            timeout_s: the time limit in seconds. The teller waits this long for the other ranks, and each other rank
                waits this long for a message of the teller.
            waits_for_all: whether the teller still waits for the remaining ranks after a rank died or left. The other
                ranks ignore this argument.

        Raises:
            StateError: this rank has left the job or closed the group.
        """
        with self._changed:
            self._number += 1
            number = self._number
        if self._control is None:
            return BarrierOutcome()
        others = [rank for rank in self._ranks if rank != self._ranks[self._rank]]
        self._context.link_with(others if self._rank == _TELLER else [self._ranks[_TELLER]])
        if self._rank == _TELLER:
            return self._tell(number, timeout_s, waits_for_all=waits_for_all)
        return self._answer(number, timeout_s)

    def close(self) -> None:
        """Stop taking part: calls in progress raise StateError."""
        if self._control is not None:
            self._control.remove(self._id)
        self.end()

    def _tell(self, number: int, timeout_s: float, *, waits_for_all: bool) -> BarrierOutcome:
        want = set(range(len(self._ranks))) - {_TELLER}
        with self._changed:
            self._deadline_s = time.monotonic() + timeout_s
            come = self._come.setdefault(number, set())
            for rank in come:
                self._hold(rank, number)
            while not self._is_over and come < want:
                left_s = self._deadline_s - time.monotonic()
                if left_s <= 0 or (not waits_for_all and self._lost.keys() & (want - come)):
                    break
                self._changed.wait(min(left_s, _LONGEST_WAIT_S))
            self._refuse_end()
            self._deadline_s = None
            self._ended = number
            del self._come[number]
            lost = tuple((rank, why) for rank, why in sorted(self._lost.items()) if rank not in come)
            # If the teller did not wait for all ranks, a living rank may just be late. Do not count it as missing.
            absent = want - come if waits_for_all or not lost else {rank for rank, _ in lost}
            missing = tuple(sorted(absent))[:_MOST_TOLD]
            if missing:
                self._decided[number] = missing
            for rank in want:
                self._send(rank, _DECIDED, _decision(number, missing))
            return BarrierOutcome(missing=missing, lost=lost)

    def _answer(self, number: int, timeout_s: float) -> BarrierOutcome:
        deadline_s, again_s = time.monotonic() + timeout_s, _FIRST_AGAIN_S
        with self._changed:
            while number not in self._decided and not self._is_over:
                held_until_s = self._held_until_s.get(number, 0.0)
                if _TELLER in self._lost or time.monotonic() >= max(deadline_s, held_until_s):
                    self._end_call(number)
                    lost = tuple((rank, why) for rank, why in self._lost.items() if rank == _TELLER)
                    return BarrierOutcome(missing=(_TELLER,), lost=lost, was_decided=False)
                self._send(_TELLER, _COME, _NUMBER.pack(number))
                self._changed.wait(again_s)
                again_s = min(2 * again_s, _LAST_AGAIN_S)
            self._refuse_end()
            missing = self._decided[number]
            self._end_call(number)
            return BarrierOutcome(missing=missing)

    def _end_call(self, number: int) -> None:
        self._ended = number
        self._held_until_s.pop(number, None)
        self._decided.pop(number, None)

    def _refuse_end(self) -> None:
        if self._is_over:
            raise StateError("monitored barrier: this rank has left the job, or the group was closed")

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Record an arrival, or a message of the teller."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        rank = self._index[notice.rank]
        (number,) = _NUMBER.unpack_from(notice.payload)
        with self._changed:
            if notice.tag == _COME:
                self._note_come(rank, number)
            elif notice.tag == _HOLD:
                self._held_until_s[number] = time.monotonic() + _HOLDING.unpack(notice.payload)[1] + _NEWS_S
            elif number > self._ended:
                self._decided[number] = struct.unpack_from(f"<{len(notice.payload) // 4 - 2}i", notice.payload, 8)
            self._changed.notify_all()

    def _note_come(self, rank: int, number: int) -> None:
        if number in self._decided:
            self._send(rank, _DECIDED, _decision(number, self._decided[number]))
        elif number <= self._ended:
            self._send(rank, _DECIDED, _decision(number, ()))
        else:
            self._come.setdefault(number, set()).add(rank)
            if number == self._number:  # _hold sends nothing if the teller's call has not started
                self._hold(rank, number)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: this listener has no named operations."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Stop waiting for a rank that died or left."""
        if rank in self._index:
            with self._changed:
                self._lost[self._index[rank]] = f"it {'died' if died else 'left'}, {why}"
                self._changed.notify_all()

    def end(self) -> None:
        """Make calls in progress raise StateError, because this rank leaves the job."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # ---- with the lock held ----

    def _hold(self, rank: int, number: int) -> None:
        if self._deadline_s is not None:
            self._send(rank, _HOLD, _HOLDING.pack(number, max(0.0, self._deadline_s - time.monotonic())))

    def _send(self, rank: int, what: int, payload: bytes) -> None:
        if self._control is None:
            return
        try:
            self._control.send(self._ranks[rank], self._id, what, payload)
        except StateError:  # the rank accepts no control messages at the moment; it repeats its announcement later
            return


def _decision(number: int, missing: tuple[int, ...]) -> bytes:
    return _NUMBER.pack(number) + struct.pack(f"<{len(missing)}i", *missing)
