"""Which clock a rank has, and how far rank 0's is from it."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from multiring.runtime.bootstrap.addresses import boot_id
from multiring.runtime.group.group import Group
from multiring.trace import Reading, best_reading

PINGS = 8  # the first wait for rank 0's turn, and the quickest counts
Patience = Callable[[], float | None]  # seconds that are left for the next message; None: until it counts as a stall


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
        group.send_async(ping, 0).wait(patience())
        group.recv_async(answer, 0).wait(patience())
        back = time.monotonic_ns()
        stamps.append((int(ping[0]), int(answer[0]), int(answer[1]), back))
    return best_reading(stamps)


def tell_time(group: Group, rank: int, patience: Patience) -> None:
    """Answer `rank`'s `ask_time`, on rank 0."""
    ping, answer = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for _ in range(PINGS):
        group.recv_async(ping, rank).wait(patience())
        answer[0] = time.monotonic_ns()
        answer[1] = time.monotonic_ns()
        group.send_async(answer, rank).wait(patience())
