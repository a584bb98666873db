"""A cache of blocks in a folder: any number of processes use it at once, and any of them may die at any moment.

    KEY/000000/17       a block: a head with its length and xxh3, and its bytes
    KEY/000000/.new-*   one that is being written; it is renamed when it is whole
    quarantine/         blocks that were found damaged
    readers/            when each process that reads needs blocks next (keeping.py)

There are no locks. Who writes a block writes it beside its place, under a name of its own, and renames: two that write
the same one cost a second fetch, never a wrong byte. Nothing is forced to the disk; a block is verified each time it is
read instead, so that what a power cut left of it is found.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring.data.packing.manifest import xxh3
from multiring.data.readers.opening import tell as tell_user
from multiring.errors import ArgumentError, DataError

QUOTA_BYTES = 64 << 30
_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"MRB1"
_QUARANTINE = "quarantine"
READERS = "readers"  # the folder in which processes say what they need next
_TEMPORARY = ".new-"
_FOLDER = 1000  # blocks of one folder
_STALE_S = 3600.0  # an unfinished block that has not grown for so long is nobody's
_DISKS_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG}
_MOST_DAMAGED = 64 << 20  # bytes of a block of which no head is left
_COUNTED_ANEW = 256  # written blocks after which others' are counted again

Tell = Callable[[str], None]


@dataclass(slots=True)
class Counts:
    """What a cache did, in this process."""

    hits: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    damaged: int = 0


class BlockCache:
    """Blocks by key and number.

    Args:
        root: the folder, made with mode 0700 where it is not there.
        quota_bytes: the most that all that is in it may take, whoever put it there.
        tell: is told of what goes wrong and goes on: damaged blocks, a full disk; by default it goes to standard error.
        foreign: whether a folder of another user may be used, which is then only read.
        share: the `Group` whose hosts pass blocks on to each other while they train, each keeping its part; every rank
            of it makes its data set then. None: as MULTIRING_DATA_SHARE says, all ranks or nobody.

    Raises:
        ArgumentError: it is another user's, or others may write to it.
    """

    def __init__(
        self,
        root: str | Path,
        quota_bytes: int = QUOTA_BYTES,
        tell: Tell = tell_user,
        *,
        foreign: bool = False,
        share: Any = None,
    ) -> None:
        self.root = Path(root)
        self.quota_bytes = quota_bytes
        self.counts = Counts()
        self.share = share
        self._tell = tell
        self.begin_here()
        self._writes = not self._require_own(foreign=foreign)
        self._unwritten = 0
        self._used = self.used_bytes()

    def __getstate__(self) -> tuple[Path, int, Tell, bool]:
        return (self.root, self.quota_bytes, self._tell, not self._writes)

    def __setstate__(self, state: tuple[Path, int, Tell, bool]) -> None:
        root, quota_bytes, said, foreign = state
        BlockCache.__init__(self, root, quota_bytes, said, foreign=foreign)

    def begin_here(self) -> None:
        """Start with a new lock and no fetches under way.

        A forked process has none of its parent's threads, so nobody there would release the old lock.
        """
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], threading.Event] = {}
        _caches.add(self)

    def _require_own(self, *, foreign: bool) -> bool:
        """Return whether it is another user's."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.root.stat()
        if found.st_uid != os.getuid():
            if not foreign:
                raise ArgumentError(
                    f"the cache {self.root} is user {found.st_uid}'s; want a folder of your own, or foreign=True to "
                    "read what is in it, verified"
                )
            return True
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ArgumentError(f"the cache {self.root} may be written by others: chmod 700 {self.root}")
        return False

    def used_bytes(self) -> int:
        """Return what is in the folder, without what readers say: some bytes a block."""
        return sum(size for path, size, _ in files_in(self.root) if path.parent.name != READERS)

    def recount(self) -> int:
        """Count again what is in the folder, as others write and remove too; return it."""
        self._used = self.used_bytes()
        return self._used

    @property
    def writes(self) -> bool:
        """Return whether blocks are kept: it is the user's own, and its disk did not fail."""
        return self._writes

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the blocks that are there."""
        found: list[int] = []
        for _, _, names in os.walk(self.root / key):
            found += [int(name) for name in names if name.isdecimal()]
        return found

    def remove(self, key: str, number: int) -> None:
        """Let go of a block; who reads it meanwhile has it yet, who comes later fetches it."""
        place = self._place(key, number)
        try:
            size = place.stat().st_size
            place.unlink()
        except OSError:
            return  # another process has done it
        with self._lock:
            self._used -= size

    def has_room(self, size: int) -> bool:
        """Return whether a block of so many bytes may be kept."""
        return self._writes and self._used + size + _HEAD.size <= self.quota_bytes

    def holds(self, key: str, number: int) -> bool:
        """Return whether a block is there; it may yet be damaged."""
        return self._place(key, number).exists()

    def get(
        self,
        key: str,
        number: int,
        fetch: Callable[[], bytes],
        wanted: int | None = None,
        keep: Callable[[bytes, bool], None] | None = None,
    ) -> bytes:
        """Return a block, from the folder or from `fetch`, which is then kept where there is room.

        In one process a block is fetched by one thread at a time; the others wait for it.

        Args:
            key: of what it is a block of: letters, digits, dots and dashes.
            number: which block.
            fetch: gives it from elsewhere.
            wanted: its xxh3, where that is known.
            keep: is given the block, and whether it was there, in place of `put`.

        Raises:
            DataError: what was fetched is not what is wanted, twice.
        """
        while True:
            found = self.read(key, number, wanted)
            if found is not None:
                self.counts.hits += 1
                if keep is not None:
                    keep(found, True)
                return found
            with self._lock:
                other = self._under_way.get((key, number))
                if other is None:
                    done = self._under_way[key, number] = threading.Event()
                    break
            other.wait()
            if not self.has_room(0) and not self.holds(key, number):
                return self._fetched(key, number, fetch, wanted)
        try:
            # Who fetched it may have ended between the look and the lock.
            found = self.read(key, number, wanted)
            if found is not None:
                self.counts.hits += 1
                return found
            data = self._fetched(key, number, fetch, wanted)
            if keep is None:
                self.put(key, number, data)
            else:
                keep(data, False)
            return data
        finally:
            with self._lock:
                del self._under_way[key, number]
            done.set()

    def _fetched(self, key: str, number: int, fetch: Callable[[], bytes], wanted: int | None) -> bytes:
        for _ in range(2):
            data = fetch()
            self.counts.fetched += 1
            self.counts.fetched_bytes += len(data)
            if wanted is None or xxh3(data) == wanted:
                return data
            self._tell(f"block {number} of {key} came damaged from its source; it is fetched again")
        raise DataError(f"block {number} of {key} comes damaged from its source: its xxh3 is another one")

    def read(self, key: str, number: int, wanted: int | None = None) -> bytes | None:
        """Return a block that is there and whole; None else, and a damaged one is put away."""
        place = self._place(key, number)
        try:
            data = place.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"{place} cannot be read: {error.strerror}; it is fetched again")
            self._quarantine(place)
            return None
        if len(data) >= _HEAD.size:
            magic, _, length, digest = _HEAD.unpack_from(data)
            body = data[_HEAD.size :]
            if magic == _MAGIC and length == len(body) and xxh3(body) == digest and wanted in {None, digest}:
                return body
        self.counts.damaged += 1
        self._tell(f"{place} is damaged; it is put into {_QUARANTINE} and fetched again")
        self._quarantine(place)
        return None

    def put(self, key: str, number: int, data: bytes) -> bool:
        """Keep a block, where there is room; return whether it is kept."""
        size = len(data) + _HEAD.size
        with self._lock:
            if not self.has_room(len(data)):
                return False
            self._used += size  # at once: other threads write too
        try:
            self._write(self._place(key, number), data)
        except OSError as error:
            with self._lock:
                self._used -= size
            if error.errno in _DISKS_ERRORS:
                # Training goes on, from the source.
                self._writes = False
                self._tell(f"the cache {self.root} cannot be written ({error.strerror}); nothing more is kept there")
                return False
            raise
        with self._lock:
            self._unwritten += 1
            counts_anew = self._unwritten >= _COUNTED_ANEW
            if counts_anew:
                self._unwritten = 0
        if counts_anew:
            self._used = self.used_bytes()
        return True

    @staticmethod
    def _write(place: Path, data: bytes) -> None:
        beside = place.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with beside.open("xb") as file:
                file.write(_HEAD.pack(_MAGIC, 0, len(data), xxh3(data)))
                file.write(data)
            beside.rename(place)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _quarantine(self, place: Path) -> None:
        away = self.root / _QUARANTINE
        try:
            away.mkdir(mode=0o700, exist_ok=True)
            place.rename(away / f"{place.parent.parent.name}-{place.name}-{secrets.token_hex(4)}")
        except OSError:
            pass  # another process has done it, or it is not ours to move: it is not used all the same

    def _place(self, key: str, number: int) -> Path:
        return self.root / key / f"{number // _FOLDER:06d}" / str(number)


def stored_bytes(sizes: Any) -> Any:
    """Return what blocks of `sizes` bytes take in a folder."""
    return sizes + _HEAD.size


def files_in(root: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield the files of a cache, their bytes, and when each was last written; what goes meanwhile is left out."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            try:
                found = path.stat()
            except OSError:
                continue
            yield path, found.st_size, found.st_mtime


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """What was removed from a cache, and what is left."""

    removed: int
    removed_bytes: int
    left_bytes: int
    foreign: int = 0  # files that no cache has written, and that stay


def clean(root: Path, *, keep_bytes: int | None = None, everything: bool = False) -> Cleaned:
    """Remove from a cache what nobody uses: what was left unfinished, what is in quarantine, and what is too much.

    A process that reads from it meanwhile fetches what it misses. Only files that a cache has written are removed:
    their place, their name and their first bytes say so. Others stay, and are counted.

    Args:
        root: the folder.
        keep_bytes: the oldest blocks go until no more are left.
        everything: all blocks go.

    Raises:
        ArgumentError: the folder has files, but none that a cache has written.
    """
    now = time.time()
    removed = removed_bytes = foreign = 0
    left: list[tuple[float, int, Path]] = []
    found = [(path, size, written, _kind_of(path, root)) for path, size, written in files_in(root)]
    if found and not any(kind for *_, kind in found):
        raise ArgumentError(
            f"{str(root)!r} is no cache of multiring's: none of its {len(found)} files is a block, and nothing was "
            "removed; want --folder of a cache"
        )
    for path, size, written, kind in found:
        if not kind:
            foreign += 1
        elif everything or kind == _QUARANTINE or (kind == _PASSING and now - written > _STALE_S):
            path.unlink(missing_ok=True)
            removed, removed_bytes = removed + 1, removed_bytes + size
        else:
            left.append((written, size, path))
    total = sum(size for _, size, _ in left)
    for _, size, path in sorted(left):
        if keep_bytes is None or total <= keep_bytes:
            break
        path.unlink(missing_ok=True)
        removed, removed_bytes, total = removed + 1, removed_bytes + size, total - size
    return Cleaned(removed=removed, removed_bytes=removed_bytes, left_bytes=total, foreign=foreign)


_BLOCK, _PASSING = "block", "passing"
_KEY = r"[0-9A-Za-z.-]+"
_BLOCKS_PLACE = re.compile(rf"{_KEY}/([0-9]{{6,}})/(0|[1-9][0-9]*)")
_NEW_PLACE = re.compile(rf"{_KEY}/[0-9]{{6,}}/{re.escape(_TEMPORARY)}[0-9a-f]{{16}}")
_QUARANTINE_PLACE = re.compile(rf"{_QUARANTINE}/{_KEY}-[0-9]+-[0-9a-f]{{8}}")
_READERS_PLACE = re.compile(rf"{READERS}/({re.escape(_TEMPORARY)})?{_KEY}-[0-9a-f]{{12}}")
_READERS_MAGIC = b"MRU1"

_caches: "weakref.WeakSet[BlockCache]" = weakref.WeakSet()


def _begin_in_fork() -> None:
    for cache in list(_caches):
        cache.begin_here()


os.register_at_fork(after_in_child=_begin_in_fork)


def remove_blocks(root: Path, key: str) -> None:
    """Remove the blocks of a cache that have this key; other files in their folders stay."""
    for path, _, _ in files_in(root / key):
        if _kind_of(path, root):
            path.unlink(missing_ok=True)
    for folder, _, _ in os.walk(root / key, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()  # which takes none that has anything in it


def _kind_of(path: Path, root: Path) -> str:
    """Return what a cache has written a file as; "" where no cache has.

    A block in quarantine, and one that was being written, may have lost some of its bytes, but has its place and name.
    """
    place = path.relative_to(root).as_posix()
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return ""
    begins = _MAGIC.startswith(start[:4])
    is_ours = {
        _BLOCK: _is_block(place, start, size),
        _PASSING: (_NEW_PLACE.fullmatch(place) and begins)
        or (_READERS_PLACE.fullmatch(place) and _READERS_MAGIC.startswith(start[:4])),
        _QUARANTINE: _QUARANTINE_PLACE.fullmatch(place) and (begins or size <= _MOST_DAMAGED),
    }
    return "" if path.is_symlink() else next((kind for kind, found in is_ours.items() if found), "")


def _is_block(place: str, start: bytes, size: int) -> bool:
    named = _BLOCKS_PLACE.fullmatch(place)
    if named is None or int(named[2]) // _FOLDER != int(named[1]) or len(start) < _HEAD.size:
        return False
    magic, _, length, _ = _HEAD.unpack(start)
    return bool(magic == _MAGIC and length >= size - _HEAD.size)  # what a power cut left may be shorter
