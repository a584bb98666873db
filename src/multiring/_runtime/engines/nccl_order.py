"""One order for the operations of all communicators of a device.

NCCL requires that devices get the operations of several communicators in the same order; otherwise two devices wait for
each other. The groups of a job overlap in any way, and each group agrees on its operations by itself. So the ranks of
an operation also agree on its time: each proposes a time later than all it has seen, and the latest proposal counts. A
device does its operations in the order of these times (Skeen's algorithm for total order: Birman & Joseph, "Reliable
communication in the presence of failures", ACM TOCS 5(1), 1987, doi:10.1145/7351.7478).

The ranks propose only when all of them have started the operation. So an operation never waits for a rank that has not
come to an earlier one.

A device that has the operations of one group only does them in the order of the calls, and does not wait for times.
That is the same order: the times of a group's operations increase in the order of the calls. Each rank decides this by
itself (docs/decisions/0115-nccl-engine.md has the proof).
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Time(NamedTuple):
    """A time of the order. `group` makes the times of different groups differ."""

    number: int
    group: int


class DeviceOrder:
    """The operations of one device whose times are proposed or agreed, and those that lead: they need no time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock may be taken twice by one thread
        self._latest = 0
        self._proposed: set[Time] = set()
        self._agreed: dict[Time, object] = {}
        self._leading: deque[object] = deque()
        self._untimed = 0  # leading operations on whose times the ranks have not agreed yet

    def lead(self, operation: object, is_alone: Callable[[], bool]) -> bool:
        """Place `operation` before all others, if no other is under way. `see` or `forget` must follow.

        Only the operations of a group that has the device for itself may lead: `is_alone` returns whether it has. It is
        called under the lock of `wait_for_leaders`, which a second group calls after it has come to the device. So this
        group either finds that it is not alone, or the second group waits for the time of `operation`.
        """
        with self._changed:
            if not is_alone() or self._agreed or self._proposed:
                return False
            self._leading.append(operation)
            self._untimed += 1
            return True

    def proposal(self) -> int:
        """Return the number that this rank proposes for the time of an operation that leads."""
        with self._changed:
            return self._latest + 1

    def see(self, number: int) -> None:
        """Take note of the time on which the ranks agreed for an operation that leads."""
        with self._changed:
            self._latest = max(self._latest, number)
        self.forget()

    def forget(self) -> None:
        """Do not wait for the time of a leading operation any more."""
        with self._changed:
            self._untimed -= 1
            self._changed.notify_all()

    def wait_for_leaders(self) -> None:
        """Wait until the ranks agree on the times of all operations that lead."""
        with self._changed:
            self._changed.wait_for(lambda: self._untimed == 0)

    def propose(self, group: int) -> Time:
        """Return a time later than all times so far."""
        with self._changed:
            self.wait_for_leaders()
            self._latest += 1
            time = Time(self._latest, group)
            self._proposed.add(time)
            return time

    def agree(self, proposed: Time, number: int, operation: object) -> None:
        """Place `operation` at the time on which its ranks agreed."""
        with self._changed:
            self._latest = max(self._latest, number)
            self._proposed.remove(proposed)
            self._agreed[Time(number, proposed.group)] = operation

    def withdraw(self, proposed: Time) -> None:
        """Forget a proposal: its ranks did not agree."""
        with self._changed:
            self._proposed.discard(proposed)

    def next(self) -> object | None:
        """Remove and return the next operation; None if an earlier one may still come."""
        with self._changed:
            if self._leading:
                return self._leading.popleft()
            if not self._agreed:
                return None
            first = min(self._agreed)
            if self._proposed and min(self._proposed) < first:
                return None
            return self._agreed.pop(first)
