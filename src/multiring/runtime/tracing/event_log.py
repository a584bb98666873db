"""The native core's events for several readers: each gets all of them, whoever asks first."""

import threading
import weakref
from collections import deque
from collections.abc import Callable

Raw = tuple[int, int, int, int, int, int, int, int]
_MOST = 1 << 16  # as many as the native core keeps


class EventReader:
    """What was recorded since this reader last asked, at most 65,536 events of it: the newest."""

    def __init__(self, log: "EventLog") -> None:
        self._log = log
        self.kept: deque[Raw] = deque(maxlen=_MOST)

    def take(self) -> list[Raw]:
        """Return them, oldest first."""
        return self._log.taken_for(self)


class EventLog:
    """Hands the events that a native context records to every reader.

    Args:
        take: returns what was recorded since the last call.
    """

    def __init__(self, take: Callable[[], list[Raw]]) -> None:
        self._take = take
        self._lock = threading.Lock()
        # No reader of its own: the two would keep each other, and the context, until garbage is collected.
        self._kept: deque[Raw] = deque(maxlen=_MOST)
        self._readers: weakref.WeakSet[EventReader] = weakref.WeakSet()

    def reader(self) -> EventReader:
        """Return a new reader, of what is recorded from now on."""
        made = EventReader(self)
        with self._lock:
            self._pass_on()
            self._readers.add(made)
        return made

    def take(self) -> list[Raw]:
        """Return what was recorded since the last call of this, oldest first."""
        return self._drained(self._kept)

    def taken_for(self, reader: EventReader) -> list[Raw]:
        """Return what `reader` has not been given."""
        return self._drained(reader.kept)

    def _drained(self, kept: deque[Raw]) -> list[Raw]:
        with self._lock:
            self._pass_on()
            found = list(kept)
            kept.clear()
        return found

    def _pass_on(self) -> None:
        fresh = self._take()
        self._kept.extend(fresh)
        for each in self._readers:
            each.kept.extend(fresh)
