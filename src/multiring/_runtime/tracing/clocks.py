"""Clocks of ranks, and time limits for messages of timelines.

A clock has an identity and an offset from rank 0's clock.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from multiring._runtime.bootstrap.addresses import boot_id
from multiring._runtime.group.group import Group
from multiring._runtime.group.handles import Handle, Waiter
from multiring.trace import ClockReading, best_reading

PINGS = 8  # the first ping may wait until rank 0 is ready; the quickest ping counts
_LEAST_S = 0.2  # the shortest wait, even past the deadline; an earlier message arrives within this time
_LOOK_S = 0.1  # the time between two checks of `gives_up`


class MessageTimeLimit:
    """The limit of the time that this rank waits for other ranks' timeline messages.

    Args:
        most_s: the seconds for all messages together; None waits until a message counts as stalled.
        gives_up: returns True to stop waiting before the deadline.
    """

    def __init__(self, most_s: float | None = None, gives_up: Callable[[], bool] = lambda: False) -> None:
        self._deadline = None if most_s is None else time.monotonic() + most_s
        self._gives_up = gives_up

    def wait(self, handle: Handle) -> Any:
        """Wait for a message and return its result.

        Raises:
            TimeoutError: the time is over. The message was made to fail, so that no rank waits for it any longer.
        """
        if self._deadline is None:
            return handle.wait()
        began = time.monotonic()
        until = max(self._deadline, began + _LEAST_S)
        while True:
            try:
                return handle.wait(max(0.0, min(_LOOK_S, until - time.monotonic())))
            except TimeoutError:
                is_missed, waited_s = self._gives_up(), time.monotonic() - began
                if not is_missed and time.monotonic() < until:
                    continue
                if isinstance(handle, Waiter):
                    for silent in handle.stalled_on()[0][:1]:
                        handle.give_up(silent)
                why = "it, or another rank, waits for this rank in another call" if is_missed else "it does not answer"
                raise TimeoutError(f"{why} after {waited_s:.1f} s") from None


FOREVER = MessageTimeLimit()


def clock_name() -> str:
    """Return the identity of this process's monotonic clock.

    The identity consists of the boot and the time namespace. Two processes have the same clock exactly if the values
    are equal.
    """
    namespace = Path("/proc/self/ns/time")
    return f"{boot_id()} {namespace.stat().st_ino}" if namespace.exists() else boot_id()


def ask_time(group: Group, patience: MessageTimeLimit) -> ClockReading:
    """Measure the offset of rank 0's clock from this rank's clock.

    Rank 0 must call `tell_time`.
    """
    stamps = []
    ping, answer = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for _ in range(PINGS):
        ping[0] = time.monotonic_ns()
        patience.wait(group.send_async(ping, 0))
        patience.wait(group.recv_async(answer, 0))
        back = time.monotonic_ns()
        stamps.append((int(ping[0]), int(answer[0]), int(answer[1]), back))
    return best_reading(stamps)


def tell_time(group: Group, rank: int, patience: MessageTimeLimit) -> None:
    """Answer the `ask_time` of `rank`. Only rank 0 calls this function."""
    ping, answer = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for _ in range(PINGS):
        patience.wait(group.recv_async(ping, rank))
        answer[0] = time.monotonic_ns()
        answer[1] = time.monotonic_ns()
        patience.wait(group.send_async(answer, rank))
