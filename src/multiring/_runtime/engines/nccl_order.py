"""One order for the operations of all communicators of a device.

NCCL requires that devices get the operations of several communicators in the same order; otherwise two devices wait for
each other. The groups of a job overlap in any way, and each group agrees on its operations by itself. So the ranks of
an operation also agree on its time: each proposes a time later than all it has seen, and the latest proposal counts. A
device does its operations in the order of these times (Skeen's algorithm for total order: Birman & Joseph, "Reliable
communication in the presence of failures", ACM TOCS 5(1), 1987, doi:10.1145/7351.7478).

The ranks propose only when all of them have started the operation. So an operation never waits for a rank that has not
come to an earlier one.
"""

import threading
from typing import NamedTuple


class Time(NamedTuple):
    """A time of the order. `group` makes the times of different groups differ."""

    number: int
    group: int


class DeviceOrder:
    """The operations of one device whose times are proposed or agreed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = 0
        self._proposed: set[Time] = set()
        self._agreed: dict[Time, object] = {}

    def propose(self, group: int) -> Time:
        """Return a time later than all times so far."""
        with self._lock:
            self._latest += 1
            time = Time(self._latest, group)
            self._proposed.add(time)
            return time

    def agree(self, proposed: Time, number: int, operation: object) -> None:
        """Place `operation` at the time on which its ranks agreed."""
        with self._lock:
            self._latest = max(self._latest, number)
            self._proposed.remove(proposed)
            self._agreed[Time(number, proposed.group)] = operation

    def withdraw(self, proposed: Time) -> None:
        """Forget a proposal: its ranks did not agree."""
        with self._lock:
            self._proposed.discard(proposed)

    def next(self) -> object | None:
        """Remove and return the next operation; None if an earlier one may still come."""
        with self._lock:
            if not self._agreed:
                return None
            first = min(self._agreed)
            if self._proposed and min(self._proposed) < first:
                return None
            return self._agreed.pop(first)
