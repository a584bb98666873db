"""Distribute the native core's events to several readers.

Each reader gets all events.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

Raw = tuple[int, int, int, int, int, int, int, int]
_MOST = 1 << 16  # the native core keeps the same number of events


class EventReader:
    """A reader of this rank's events.

    The reader keeps the newest 65,536 events that were recorded since the last `take`.
    """

    def __init__(self, log: "EventLog") -> None:
        self._log = log
        self.kept: deque[Raw] = deque(maxlen=_MOST)

    def take(self) -> list[Raw]:
        """Return the events since the last call, oldest first."""
        return self._log.taken_for(self)


class EventLog:
    """Hands the events that a native context records to every reader.

    Args:
        take: returns the events recorded since its last call.
    """

    def __init__(self, take: Callable[[], list[Raw]]) -> None:
        self._take = take
        self._lock = threading.Lock()
        # The log has no reader of its own. The log and the reader would form a cycle, and keep the context alive until
        # garbage collection.
        self._kept: deque[Raw] = deque(maxlen=_MOST)
        self._readers: weakref.WeakSet[EventReader] = weakref.WeakSet()

    def reader(self) -> EventReader:
        """Return a new reader of the events that are recorded from now on."""
        made = EventReader(self)
        with self._lock:
            self._pass_on()
            self._readers.add(made)
        return made

    def take(self) -> list[Raw]:
        """Return the events recorded since the last call of this method, oldest first."""
        return self._drained(self._kept)

    def taken_for(self, reader: EventReader) -> list[Raw]:
        """Return the events that `reader` has not received yet."""
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
