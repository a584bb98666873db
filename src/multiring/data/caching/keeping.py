"""Decide which blocks of a pack stay in memory and in the cache's folder while a known order is read.

Each process that reads a pack in a known order publishes in a file when it needs each block next. All processes of the
host, of any job, then evict the blocks that no process needs soon. A file is ignored if its counter stops changing.
"""

import contextlib
import secrets
import struct
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multiring._forks import begun_in_forks
from multiring.data.caching.blocks import READERS, BlockCache, stored_bytes
from multiring.data.eviction import NEVER, LeastRecent, NextUse, Policy, Times, Uses
from multiring.data.eviction_search import LOOK

_TELL_S = 1.0  # seconds after which a process publishes its uses again, and reads the uses of others
_STALE_S = 60.0  # seconds without a change after which another reader's file is ignored
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"MRU1"
_FEWEST_S = 1e-6
# A block replaces another only if its known uses exceed _MARGIN times the other's uses by more than _SOME. In an order
# without repeats, the counts differ only because a part of the epoch has passed. Without the margin, such differences
# would cause useless fetches of whole blocks.
_MARGIN, _SOME = 2.0, 4


class Keeping:
    """The two tiers of one pack's blocks in one process: memory and disk.

    Args:
        cache: the cache whose folder is the disk tier.
        key: the pack's key.
        sizes: the bytes of each block.
        memory_bytes: the bytes of the memory tier.
    """

    def __init__(self, cache: BlockCache, key: str, sizes: list[int], memory_bytes: int) -> None:
        self._cache, self._key = cache, key
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._memory_bytes = memory_bytes
        self._mine: NDArray[np.bool_] | None = None
        self.begin_in_fork()
        begun_in_forks(self)

    def begin_in_fork(self) -> None:
        """Start with new locks, no blocks in memory and no known uses.

        In a fork, another thread of the parent may have left the blocks and their sizes half changed. The file of
        published uses belongs to the parent.
        """
        self._memory: Policy = LeastRecent(self._sizes, self._memory_bytes)
        self._blocks: dict[int, bytes] = {}
        self._disk = NextUse(stored_bytes(self._sizes), self._cache.quota_bytes)
        self._uses: Uses | None = None
        self._lock = threading.RLock()
        self._others = _Others(self._cache.root, self._key, len(self._sizes))
        self._began = (time.monotonic(), 0)
        self._look_at = 0.0
        self._looking = threading.Lock()
        self._accepted: dict[int, int] = {}  # blocks that are being fetched, and the block to evict for each
        self._parted = np.zeros(len(self._sizes), dtype=np.bool_)  # blocks of which each sample uses only a part

    def expect(self, uses: Uses) -> None:
        """From now on, keep the blocks that `uses` needs soonest."""
        with self._lock:
            self._uses = uses
            self._began = (time.monotonic(), uses.now)
            kept = NextUse(self._sizes, self._memory_bytes)
            for each in self._blocks:
                kept.put(each)
            self._memory = kept
        self._look()

    @property
    def is_expecting(self) -> bool:
        """Return whether the next uses are known."""
        return self._uses is not None

    def only(self, mine: NDArray[np.bool_]) -> None:
        """Keep only the blocks `mine`, bool (blocks,), on the disk.

        Other hosts keep the other blocks.
        """
        self._mine = mine

    def advance(self, now: int) -> None:
        """Record that the reader has reached use `now`."""
        with self._lock:
            if self._uses is None:
                return
            self._uses.advance(now)
        if time.monotonic() > self._look_at:
            self._look()

    def _look(self) -> None:
        """Publish this process's uses, and read the uses of other processes and the list of blocks on the disk.

        Only one thread at a time does this. The folder may be large and its disk slow. The thread therefore holds the
        readers' lock only while it copies uses, and while it applies the results.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            began = time.monotonic()
            with self._lock:
                told = None if self._uses is None else self._uses.ahead() * self._pace()
                held = self._disk.held.copy()
            if told is not None:
                self._others.tell(told)
            seen = self._others.seen()
            there = np.zeros(len(self._sizes), dtype=np.bool_)
            numbers = np.asarray(self._cache.numbers(self._key), dtype=np.int64)
            there[numbers[numbers < len(there)]] = True
            used = self._cache.recount()
            with self._lock:
                self._others.take(seen)
                # Changes that this process made since the copy are newer than the list: do not undo them.
                for number in np.flatnonzero(held & ~there & self._disk.held).tolist():
                    self._disk.drop(number)
                for number in np.flatnonzero(~held & there & ~self._disk.held).tolist():
                    if self._cache.holds(self._key, number):
                        self._disk.put(number)
                # Other files in the folder count against the quota, too.
                others = max(0, used - self._disk.used_bytes)
                self._disk.capacity_bytes = max(0, self._cache.quota_bytes - others)
            # This takes long for a large folder. Spend at most a twentieth of the time on it.
            now = time.monotonic()
            self._look_at = now + max(_TELL_S, 20 * (now - began))
        finally:
            self._looking.release()

    def _pace(self) -> float:
        """Return the seconds from one use to the next."""
        if self._uses is None or self._uses.now <= self._began[1]:
            return 1.0
        return max(_FEWEST_S, (time.monotonic() - self._began[0]) / (self._uses.now - self._began[1]))

    def _rarest(self, number: int, paid: int) -> int | None:
        """Return the block to evict for a partly used block; None if fetching the whole block does not pay.

        Fetching such a block as a whole pays only after several uses. The decision therefore depends on the numbers of
        known uses, not on the next use.
        """
        assert self._uses is not None  # noqa: S101 -- callers have checked it
        left = self._uses.left()
        nobody = self._disk.held if self._others.is_alone else self._disk.held & ~(self._others.times() < NEVER)
        held = np.flatnonzero(nobody)
        if not len(held):
            return None
        rarest = int(held[np.argmin(left[held])])
        gained = int(left[number]) - 1 - paid  # in units of one use of this size, like `left`
        return (
            rarest if gained > _MARGIN * left[rarest] + _SOME and self._sizes[number] <= self._sizes[rarest] else None
        )

    def _upcoming(self, paid: int) -> list[int]:
        """Return the units of the next uses for a search of the best eviction; empty if no search is needed.

        A search needs whole uses of few units of different sizes, and no other reader of the pack.
        """
        if paid or self._uses is None or not self._others.is_alone or self._parted.any() or not self._disk.is_coarse:
            return []
        found: list[int] = self._uses.upcoming(LOOK).tolist()
        return found

    def _times(self) -> Times:
        assert self._uses is not None  # noqa: S101 -- callers have checked it
        times = self._uses.ahead()
        if not self._others.is_alone:
            times = np.minimum(times, self._others.times() / self._pace())
        return times

    def in_memory(self, number: int) -> bytes | None:
        """Return a block if it is in memory, otherwise None."""
        found = self._blocks.get(number)
        if found is not None:
            with self._lock:
                self._memory.touch(number)
        return found

    def takes(self, number: int, paid: int) -> bool:
        """Return whether a missing block would be kept, and is worth fetching as a whole.

        Args:
            number: the block's number.
            paid: the number of further uses after which fetching the whole block costs no more than fetching the used
                parts.
        """
        if self._mine is not None and not self._mine[number]:
            return False
        with self._lock:
            self._parted[number] |= paid > 0
            if self._cache.has_room(int(self._sizes[number])) or self._uses is None:
                return self._cache.has_room(int(self._sizes[number]))
            if not self._cache.writes or not paid:
                return self._cache.writes
            rarest = self._rarest(number, paid)
            if rarest is not None:
                self._accepted[number] = rarest
            return rarest is not None

    def keep(self, number: int, data: bytes, *, on_disk: bool, paid: int = 0) -> None:
        """Keep a block, fetched or read from the disk, if it is needed soon enough.

        Args:
            number: the block's number.
            data: the block.
            on_disk: whether the block is on the disk already.
            paid: as in `takes`.
        """
        with self._lock:
            times = self._times() if self._uses is not None else np.empty(0)
            evicted = None if self._memory_bytes == 0 else self._memory.admit(number, times)
            if evicted is not None:
                self._blocks[number] = data
                for each in evicted:
                    self._blocks.pop(each, None)
            if on_disk or (self._mine is not None and not self._mine[number]):
                return
            rarest = self._accepted.pop(number, None)
            if self._uses is not None and not self._cache.has_room(len(data)):
                victims = self._victims(number, times, rarest, paid)
                for each in victims or ():
                    self._cache.remove(self._key, each)
                if victims is None:
                    return
        if self._cache.put(self._key, number, data):
            with self._lock:
                self._disk.put(number)
        else:
            with self._lock:
                self._disk.drop(number)

    def _victims(self, number: int, times: Times, rarest: int | None, paid: int) -> list[int] | None:
        """Return the blocks to evict for a fetched block; None if it is not kept."""
        if rarest is not None:
            # The eviction was decided before the fetch; another thread may have evicted the block since.
            if not self._disk.held[rarest]:
                return None
            self._disk.drop(rarest)
            self._disk.put(number)
            return [rarest]
        assert self._uses is not None  # noqa: S101 -- the caller has checked it
        # The next use of a block that is used in parts needs only a part. A block that is used as a whole therefore
        # stays, unless it has no known use.
        times = np.where(self._parted & (times < NEVER), 0.0, times)
        return None if paid else self._disk.admit(number, times, self._uses.of(number, 1), self._upcoming(paid))

    def close(self) -> None:
        """Withdraw this process's published uses."""
        self._others.end()


class _Others:
    """The next uses of a pack's blocks by other processes of this host."""

    def __init__(self, root: Path, key: str, units: int) -> None:
        self._folder, self._units = root / READERS, units
        self._prefix = f"{key}-"
        self._own = self._folder / f"{self._prefix}{secrets.token_hex(6)}"
        self._count = 0
        self._seen: dict[str, tuple[int, float, Times]] = {}
        self.is_alone = True

    def tell(self, seconds: Times) -> None:
        """Publish when this process needs each block next, in seconds from now."""
        self._count += 1
        beside = self._own.with_name(f".new-{self._own.name}")
        with contextlib.suppress(OSError):  # without the file, other processes only evict less well
            self._folder.mkdir(mode=0o700, exist_ok=True)
            beside.write_bytes(_HEAD.pack(_MAGIC, self._units, self._count) + seconds.astype("<f4").tobytes())
            beside.rename(self._own)

    def seen(self) -> "dict[str, tuple[int, float, Times]]":
        """Read and return the published uses of the other processes."""
        now = time.monotonic()
        found: dict[str, tuple[int, float, Times]] = {}
        try:
            paths = list(self._folder.glob(f"{self._prefix}*"))
        except OSError:
            paths = []
        for path in paths:
            if path == self._own:
                continue
            told = self._read(path)
            if told is None:
                continue
            count, times = told
            last = self._seen.get(path.name)
            when = now if last is None or last[0] != count else last[1]
            if now - when < _STALE_S:
                found[path.name] = (count, when, times)
            else:
                found[path.name] = (count, when, np.full(self._units, NEVER))
        return found

    def take(self, seen: "dict[str, tuple[int, float, Times]]") -> None:
        """Replace the known uses by `seen`."""
        self._seen = seen
        self.is_alone = not seen

    def _read(self, path: Path) -> tuple[int, Times] | None:
        size = _HEAD.size + 4 * self._units
        try:
            with path.open("rb") as file:
                data = file.read(size + 1)
        except OSError:
            return None
        if len(data) != size:
            return None
        magic, units, count = _HEAD.unpack_from(data)
        times = np.frombuffer(data, "<f4", offset=_HEAD.size).astype(np.float64)
        if magic != _MAGIC or units != self._units or np.isnan(times).any() or (times < 0).any():
            return None
        return count, times

    def times(self) -> Times:
        """Return the seconds until any other process needs each block."""
        found = np.full(self._units, NEVER)
        now = time.monotonic()
        for _, when, each in self._seen.values():
            found = np.minimum(found, np.maximum(0.0, each - (now - when)))
        return found

    def end(self) -> None:
        """Remove this process's file."""
        with contextlib.suppress(OSError):
            self._own.unlink(missing_ok=True)
