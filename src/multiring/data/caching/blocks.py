"""A cache of blocks in a folder. Any number of processes can use it at once, and any of them can die at any moment.

    KEY/000000/17       a block: a head with its length and xxh3, and its bytes
    KEY/000000/.new-*   an unfinished block; its writer renames it when it is complete
    quarantine/         damaged blocks
    readers/            each reading process's next uses of the blocks (keeping.py)

There are no locks between processes. A writer writes a block to a temporary file of its own, and renames the file. If
two processes write the same block, one fetch was useless, but the bytes are right. Writes are not synced to the disk.
Each read verifies the block, which detects blocks that a power cut left incomplete.
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

from multiring._arguments import require_flag, require_function, require_path, require_whole
from multiring.data.readers.manifest import xxh3
from multiring.data.readers.opening import tell as tell_user
from multiring.errors import ArgumentError, DataError

QUOTA_BYTES = 64 << 30
_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"MRB1"
_QUARANTINE = "quarantine"
READERS = "readers"  # the folder in which processes publish their next uses of blocks
_TEMPORARY = ".new-"
_FOLDER = 1000  # blocks of one folder
_STALE_S = 3600.0  # seconds after which an unchanged unfinished block is considered abandoned
_DISKS_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG}
_MOST_DAMAGED = 64 << 20  # the most bytes of a damaged block without a valid head
_COUNTED_ANEW = 256  # blocks that this process writes before it counts the folder's bytes again

Tell = Callable[[str], None]


@dataclass(slots=True)
class Counts:
    """Counts of a cache's reads and fetches in this process."""

    hits: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    damaged: int = 0


class BlockCache:
    """A cache of blocks on disk, by key and number.

    Args:
        root: the folder; it is created with mode 0700 if it does not exist.
        quota_bytes: the most bytes of all files in the folder, from all processes.
        tell: called with a warning about damaged blocks or a full disk; by default it prints to standard error.
        foreign: whether to accept the folder of another user, which is then only read.
        share: the `Group` whose hosts share blocks while they train, and each keep a part of them. Every rank of the
            group must then make the data set. With None, MULTIRING_DATA_SHARE decides whether all ranks share.

    Raises:
        ArgumentError: the folder belongs to another user, other users may write to it, it cannot be made, or an
            argument has a wrong type.
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
        self.root = require_path("root", root)
        self.quota_bytes = require_whole("quota_bytes", quota_bytes)
        require_function("tell", tell, "a function that takes a text")
        foreign = require_flag("foreign", foreign)
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
        """Start with a new lock and no running fetches.

        A forked process has none of its parent's threads, so no thread there would release the old lock.
        """
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], threading.Event] = {}
        _caches.add(self)

    def _require_own(self, *, foreign: bool) -> bool:
        """Return whether the folder belongs to another user; raise ArgumentError if it must not be used."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"the cache {self.root} cannot be made: {error.strerror}; want a folder that this user can write to"
            ) from None
        found = self.root.stat()
        if found.st_uid != os.getuid():
            if not foreign:
                raise ArgumentError(
                    f"the cache {self.root} belongs to user {found.st_uid}; use a folder of your own, or pass "
                    "foreign=True to read its blocks, which are verified"
                )
            return True
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ArgumentError(f"the cache {self.root} can be written by other users: run chmod 700 {self.root}")
        return False

    def used_bytes(self) -> int:
        """Return the bytes of all files in the folder, except the files of `readers`."""
        return sum(size for path, size, _ in files_in(self.root) if path.parent.name != READERS)

    def recount(self) -> int:
        """Count the folder's bytes again, because other processes change it; return them."""
        self._used = self.used_bytes()
        return self._used

    @property
    def writes(self) -> bool:
        """Return whether blocks can be kept.

        Blocks cannot be kept if the folder belongs to another user or its disk has failed.
        """
        return self._writes

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the cached blocks."""
        found: list[int] = []
        for _, _, names in os.walk(self.root / key):
            found += [int(name) for name in names if name.isdecimal()]
        return found

    def remove(self, key: str, number: int) -> None:
        """Evict a block.

        Readers that already opened it keep their data; later readers fetch it again.
        """
        place = self._place(key, number)
        try:
            size = place.stat().st_size
            place.unlink()
        except OSError:
            return  # another process has removed the block
        with self._lock:
            self._used -= size

    def has_room(self, size: int) -> bool:
        """Return whether a block of `size` bytes may be kept."""
        return self._writes and self._used + size + _HEAD.size <= self.quota_bytes

    def holds(self, key: str, number: int) -> bool:
        """Return whether the cache has a block, which may be damaged."""
        return self._place(key, number).exists()

    def get(
        self,
        key: str,
        number: int,
        fetch: Callable[[], bytes],
        wanted: int | None = None,
        keep: Callable[[bytes, bool], None] | None = None,
    ) -> bytes:
        """Return a block from the folder or, if it is missing, from `fetch`.

        A fetched block is kept if there is room. In one process, only one thread at a time fetches a block; other
        threads wait for it.

        Args:
            key: the key of the block's file or pack: letters, digits, dots and dashes.
            number: the block's number.
            fetch: returns the block from its source.
            wanted: the block's xxh3, if it is known.
            keep: called instead of `put`, with the block and whether it came from the folder.

        Raises:
            DataError: two fetches returned a block with another xxh3.
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
            # Another thread may have finished its fetch between the read above and the lock.
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
        raise DataError(f"block {number} of {key} is damaged at its source: its xxh3 does not match")

    def read(self, key: str, number: int, wanted: int | None = None) -> bytes | None:
        """Return a block, or None if it is missing or damaged.

        Move a damaged block to quarantine.
        """
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
        """Keep a block if there is room; return whether it is kept."""
        size = len(data) + _HEAD.size
        with self._lock:
            if not self.has_room(len(data)):
                return False
            self._used += size  # reserve the bytes before writing, because other threads write too
        try:
            self._write(self._place(key, number), data)
        except OSError as error:
            with self._lock:
                self._used -= size
            if error.errno in _DISKS_ERRORS:
                # The training continues without the cache, and reads from the source.
                self._writes = False
                self._tell(f"the cache {self.root} cannot be written ({error.strerror}); nothing more is cached there")
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
            pass  # another process has moved it, or this user must not move it; the block is not used in either case

    def _place(self, key: str, number: int) -> Path:
        return self.root / key / f"{number // _FOLDER:06d}" / str(number)


def stored_bytes(sizes: Any) -> Any:
    """Return the bytes of the files of blocks that have `sizes` bytes."""
    return sizes + _HEAD.size


def files_in(root: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield each file of a cache, with its size in bytes and its modification time.

    Files that are removed during the search are left out.
    """
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
    """The numbers of removed and remaining files and bytes after `clean`."""

    removed: int
    removed_bytes: int
    left_bytes: int
    foreign: int = 0  # files that were not written by a cache, and that stay


def clean(root: Path, *, keep_bytes: int | None = None, everything: bool = False) -> Cleaned:
    """Remove abandoned unfinished blocks, blocks in quarantine, and excess blocks.

    Processes that use the cache at the same time fetch missing blocks again. Only files that a cache wrote are removed:
    they are recognised by their folder, name and first bytes. Other files stay, and are counted.

    Args:
        root: the folder.
        keep_bytes: the oldest blocks are removed until at most this many bytes remain.
        everything: whether to remove all blocks.

    Raises:
        ArgumentError: the folder has files, but no file that a cache wrote.
    """
    now = time.time()
    removed = removed_bytes = foreign = 0
    left: list[tuple[float, int, Path]] = []
    found = [(path, size, written, _kind_of(path, root)) for path, size, written in files_in(root)]
    if found and not any(kind for *_, kind in found):
        raise ArgumentError(
            f"{str(root)!r} is not a cache of multiring: none of its {len(found)} files is a block. Nothing was "
            "removed; give the folder of a cache with --folder"
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
    """Remove a cache's blocks that have this key; other files stay."""
    for path, _, _ in files_in(root / key):
        if _kind_of(path, root):
            path.unlink(missing_ok=True)
    for folder, _, _ in os.walk(root / key, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()  # fails if the folder is not empty, which is intended


def _kind_of(path: Path, root: Path) -> str:
    """Return the kind of a cache's file; "" if no cache wrote the file.

    A block in quarantine or an unfinished block may lack bytes. It is recognised by its folder and name.
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
    return bool(magic == _MAGIC and length >= size - _HEAD.size)  # after a power cut, the file may be too short
