"""Catch the launcher's signals and make them available to poll."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, final

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # forwarded to the ranks, which may save their work (Slurm's --signal)


@final
class StopSignals:
    """A context manager that catches stop signals and keeps them for `take`.

    The signals are SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2.

    These signals and SIGCHLD make `descriptor` readable, which wakes a poll. A signal that is ignored on entry (nohup,
    a shell's background job) stays ignored. Enter the context in the main thread only.
    """

    def __init__(self) -> None:
        self._caught: list[int] = []
        self.have_asked_for_end = False  # whether a signal that is not forwarded has come
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self.descriptor, self._wakeup = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._wakeup, False)
        self._former_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in (*_STOPPING, *PASSED_ON):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handle(number, self._catch)
        self._handle(signal.SIGCHLD, _wake_only)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self.descriptor)
        os.close(self._wakeup)

    def take(self) -> list[int]:
        """Return the signals caught since the last call, oldest first."""
        caught, self._caught = self._caught, []
        return caught

    def clear(self) -> None:
        """Make `descriptor` unreadable until the next signal."""
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            return

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self._caught.append(number)
        self.have_asked_for_end |= number not in PASSED_ON

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._former[number] = signal.signal(number, handler)


def _wake_only(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor is written only for signals that have a handler."""
