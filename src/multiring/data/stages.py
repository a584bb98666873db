"""Measure the workers' time by stage: reading (source, disk or other hosts), decoding, and copying into the batch."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from multiring._forks import begun_in_forks
from multiring.data.readers.storage import LocalStorage, RemoteStorage, Storage

SOURCE, DISK, NETWORK, DECODE, COPY = ("source", "disk", "network", "decode", "copy")
REQUESTED = (SOURCE, DISK, NETWORK)  # stages in which workers wait for requests to a shared resource


def working_s(spent: Mapping[str, float]) -> float:
    """Return the seconds of workers by stage as one sum, without the time in which they waited for a core.

    Args:
        spent: the seconds by stage; "queued" are those in which workers waited for a core, and "cpu" those on one.
    """
    passed_s = sum(spent.get(stage, 0.0) for stage in (*REQUESTED, DECODE, COPY))
    # The system may count a wait for a core that began before the measurement.
    return max(spent.get("cpu", 0.0), passed_s - spent.get("queued", 0.0))


class StageClock:
    """Counts seconds by stage, separately for each thread.

    For a stage with requests, `STAGE alone` has the seconds of requests that began alone: no other request of this
    process was running in the stage. `STAGE beside` has the seconds of all other requests. `STAGE alone requests` and
    `STAGE beside requests` are the numbers of these requests.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self.begin_in_fork()
        begun_in_forks(self)

    def begin_in_fork(self) -> None:
        """Begin without requests: those of the parent's threads do not end in a fork."""
        self._under_way: dict[str, set[int]] = {stage: set() for stage in REQUESTED}

    def _spent(self) -> dict[str, float]:
        if not hasattr(self._here, "spent"):
            self._here.spent = defaultdict(float)
            self._here.within = [0.0]
        found: dict[str, float] = self._here.spent
        return found

    @contextmanager
    def request(self, stage: str) -> Iterator[None]:
        """Count a `with` block's time for `stage`, without the time of nested requests."""
        spent, within = self._spent(), self._here.within
        others = self._under_way[stage]
        here = threading.get_ident()
        how = "beside" if others else "alone"
        others.add(here)
        within.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            own = took - within.pop()
            within[-1] += took
            others.discard(here)
            spent[stage] += own
            spent[f"{stage} {how}"] += own
            spent[f"{stage} {how} requests"] += 1

    def take(self) -> dict[str, float]:
        """Return the seconds that this thread has spent since its last call, by stage."""
        spent = self._spent()
        found = dict(spent)
        spent.clear()
        return found

    def timed(self, storage: Storage, stage: str | None = None) -> "TimedStorage":
        """Return a storage whose reads are counted for `stage`.

        The default stage is SOURCE for a remote storage and DISK for any other.
        """
        return TimedStorage(storage, self, stage or (SOURCE if isinstance(storage, RemoteStorage) else DISK))

    def __reduce__(self) -> Any:
        return StageClock, ()


class TimedStorage:
    """A storage whose reads are counted for a stage."""

    def __init__(self, storage: Storage, clock: StageClock, stage: str) -> None:
        self.url = storage.url
        self._storage, self._clock, self._stage = storage, clock, stage
        self.names, self.size = storage.names, storage.size
        # A storage that overrides `read_into` must be read record by record.
        if type(storage).read_into is LocalStorage.read_into:
            self.read_rows = self._read_rows
            self.bytes_between = self._bytes_between

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on."""
        with self._clock.request(self._stage):
            self._storage.read_into(name, begin, out)

    def _read_rows(self, *what: Any) -> None:
        with self._clock.request(self._stage):
            self._storage.read_rows(*what)  # type: ignore[attr-defined]  # local storages have this method

    def _bytes_between(self, name: str, begin: int, end: int) -> bytes:
        with self._clock.request(self._stage):
            found: bytes = self._storage.bytes_between(name, begin, end)  # type: ignore[attr-defined]  # as above
            return found

    def __reduce__(self) -> Any:
        return TimedStorage, (self._storage, self._clock, self._stage)
