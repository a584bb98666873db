"""Gradients go first: blocks wait while the job's own bytes move between hosts."""

import threading
import time
from collections.abc import Callable

_LOOK_S = 0.002
# At least one piece goes in so long: a training that waits for its data sends no gradients either.
_LONGEST_S = 0.02


class Yielding:
    """Tells when a piece of a block may be sent.

    Args:
        moved: gives how many bytes of collectives other hosts have taken so far.
        clock: in seconds.
        sleep: for some seconds.
    """

    def __init__(
        self,
        moved: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._moved, self._clock, self._sleep = moved, clock, sleep
        self._lock = threading.Lock()
        self._last = moved()
        self._looked = clock()
        self._busy = False

    def is_busy(self) -> bool:
        """Return whether collectives moved bytes when it was last looked, at most some milliseconds ago."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= _LOOK_S:
                found = self._moved()
                self._busy, self._last, self._looked = found != self._last, found, now
            return self._busy

    def wait(self) -> None:
        """Return when a piece may go: at once where nothing else moves, else after some hundredths of a second."""
        until = self._clock() + _LONGEST_S
        while self.is_busy() and self._clock() < until:
            self._sleep(_LOOK_S)
