"""Where workers' time goes: read from the source, the host's disk or other hosts, decoded, or put into the batch."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multiring.data.balance.decision import DISK, REQUESTED, SOURCE
from multiring.data.readers.storage import LocalStorage, RemoteStorage, Storage


class StageClock:
    """Counts seconds by stage, for each thread of its own.

    Of a stage that is asked for something, `STAGE alone` and `STAGE beside` are the seconds of requests that began
    while no other one, or at least one, of this process was under way, and `... requests` their number.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._under_way: dict[str, set[int]] = {stage: set() for stage in REQUESTED}

    def _spent(self) -> dict[str, float]:
        if not hasattr(self._here, "spent"):
            self._here.spent = defaultdict(float)
            self._here.within = [0.0]
        found: dict[str, float] = self._here.spent
        return found

    @contextmanager
    def request(self, stage: str) -> Iterator[None]:
        """Count the time within it, without that of requests within this one."""
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
        """Return what this thread has spent since it last asked."""
        spent = self._spent()
        found = dict(spent)
        spent.clear()
        return found

    def timed(self, storage: Storage, stage: str | None = None) -> "TimedStorage":
        """Return a storage whose reads are counted, as the source's where it is a remote one."""
        return TimedStorage(storage, self, stage or (SOURCE if isinstance(storage, RemoteStorage) else DISK))

    def __reduce__(self) -> Any:
        return StageClock, ()


class TimedStorage:
    """A storage whose reads are counted as of a stage."""

    def __init__(self, storage: Storage, clock: StageClock, stage: str) -> None:
        self.url = storage.url
        self._storage, self._clock, self._stage = storage, clock, stage
        self.names, self.size = storage.names, storage.size
        # One that reads in its own way has to be asked record by record.
        if type(storage).read_into is LocalStorage.read_into:
            self.read_rows = self._read_rows

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on."""
        with self._clock.request(self._stage):
            self._storage.read_into(name, begin, out)

    def _read_rows(self, *what: Any) -> None:
        with self._clock.request(self._stage):
            self._storage.read_rows(*what)  # type: ignore[attr-defined]  # a local one has it

    def __reduce__(self) -> Any:
        return TimedStorage, (self._storage, self._clock, self._stage)
