"""Give gradients priority: blocks wait while the job's collectives move bytes between hosts."""

import threading
import time
from collections.abc import Callable

_LOOK_S = 0.002
# The longest wait in seconds before a piece is sent anyway: a training that waits for its data sends no gradients.
_LONGEST_S = 0.02


class Yielding:
    """Delays pieces of blocks while collectives move bytes.

    Args:
        moved: returns how many bytes of collectives other hosts have received so far.
        clock: returns the time in seconds.
        sleep: called with the seconds to sleep.
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
        """Return whether collectives moved bytes in the last few milliseconds."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= _LOOK_S:
                found = self._moved()
                self._busy, self._last, self._looked = found != self._last, found, now
            return self._busy

    def wait(self) -> None:
        """Wait until a piece may be sent.

        The wait ends when collectives move no bytes, or after 20 ms.
        """
        until = self._clock() + _LONGEST_S
        while self.is_busy() and self._clock() < until:
            self._sleep(_LOOK_S)
