"""Which clock a rank has, and how far rank 0's is from it; how long other ranks are waited for."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from multiring.runtime.bootstrap.addresses import boot_id
from multiring.runtime.group.group import Group
from multiring.runtime.group.handles import Handle, Waiter
from multiring.trace import Reading, best_reading

PINGS = 8  # the first wait for rank 0's turn, and the quickest counts
_LEAST_S = 0.2  # for a rank whose turn comes late: what it has sent is there already
_LOOK_S = 0.1  # between two looks at whether to give up


class Patience:
    """How long other ranks are waited for with a timeline.

    Args:
        most_s: for all messages together; None: until one counts as stalled.
        gives_up: whether to wait no longer, whatever time is left.
    """

    def __init__(self, most_s: float | None = None, gives_up: Callable[[], bool] = lambda: False) -> None:
        self._deadline = None if most_s is None else time.monotonic() + most_s
        self._gives_up = gives_up

    def wait(self, handle: Handle) -> Any:
        """Return a message's result.

        Raises:
            TimeoutError: the time is over. The message has failed then, so that nothing waits for it any more.
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
                why = (
                    "it, or another rank, waits for this rank in something else" if is_missed else "it does not answer"
                )
                raise TimeoutError(f"{why} after {waited_s:.1f} s") from None


FOREVER = Patience()


def clock_name() -> str:
    """Return what is equal for two processes exactly when they have one monotonic clock: a boot, a time namespace."""
    namespace = Path("/proc/self/ns/time")
    return f"{boot_id()} {namespace.stat().st_ino}" if namespace.exists() else boot_id()


def ask_time(group: Group, patience: Patience) -> Reading:
    """Return how rank 0's clock stands to this rank's; rank 0 calls `tell_time`."""
    stamps = []
    ping, answer = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for _ in range(PINGS):
        ping[0] = time.monotonic_ns()
        patience.wait(group.send_async(ping, 0))
        patience.wait(group.recv_async(answer, 0))
        back = time.monotonic_ns()
        stamps.append((int(ping[0]), int(answer[0]), int(answer[1]), back))
    return best_reading(stamps)


def tell_time(group: Group, rank: int, patience: Patience) -> None:
    """Answer `rank`'s `ask_time`, on rank 0."""
    ping, answer = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for _ in range(PINGS):
        patience.wait(group.recv_async(ping, rank))
        answer[0] = time.monotonic_ns()
        answer[1] = time.monotonic_ns()
        patience.wait(group.send_async(answer, rank))
