"""`cached`: keep the samples of any map-style data set on this host's disk from the first epoch on."""

import hashlib
import os
import re
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Any

from multiring._arguments import is_of, require_path, require_whole, shown
from multiring._settings import Settings
from multiring._settings import cache_folder as users_cache
from multiring.data.caching.blocks import QUOTA_BYTES, BlockCache, remove_blocks
from multiring.data.caching.samples import packed, unpacked
from multiring.data.readers.manifest import xxh3
from multiring.data.readers.opening import tell
from multiring.errors import ArgumentError

_OWN = re.compile(r"map-of-(?P<host>[0-9a-f]{16})-(?P<process>\d+)-(?P<began>\d+)-[0-9a-f]{16}")


def cache_folder(settings: Settings | None = None) -> Path:
    """Return the folder of this user's cache.

    It is MULTIRING_DATA_CACHE, or by default multiring's folder in the user's cache folder.
    """
    chosen = (settings or Settings.from_environment()).data_cache
    return Path(chosen) if chosen else users_cache() / "data"


def cached(
    dataset: Any, cache: str | Path | None = None, *, key: str | None = None, quota_bytes: int = QUOTA_BYTES
) -> "CachedSamples":
    """Return a data set that keeps samples on this host's disk from their first read.

    A script changes one line: `dataset = cached(dataset)`. The cache keeps the samples that `dataset` returns. Apply
    random augmentation after the cache: a data set whose samples change between reads raises an error.

    The samples may depend on files, labels and code that the cache cannot examine. Without `key`, the kept samples
    therefore belong to the returned object and its copies in worker processes. They are removed together with the
    object.

    Args:
        dataset: a data set with a length, and samples by number. Samples can be arrays, torch tensors, numbers, text,
            bytes, Pillow images, None, and tuples, lists and dicts of these. It must not change while it is cached.
        cache: the folder; by default the user's cache folder (MULTIRING_DATA_CACHE).
        key: a name of the samples' content, for instance "cifar10 224px labels-v3". Ranks, jobs and later runs with the
            same key share the kept samples. Pass another key when a sample changes. The data set's type, its length,
            and its first, middle and last sample are added to the key.
        quota_bytes: the most bytes that the folder may hold.

    Raises:
        ArgumentError: the data set has no samples, a sample differs when it is read again, or another argument has a
            wrong type.
        DataError: a sample has a value that cannot be kept.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ArgumentError(f"dataset={shown(dataset)}: want a data set with a length, and samples by number")
    if key is not None and (not is_of(key, str) or not key):
        raise ArgumentError(f"key={shown(key)}: want a text that names the samples' content, or None")
    folder = require_path("cache", cache) if cache is not None else cache_folder()
    return CachedSamples(dataset, folder, require_whole("quota_bytes", quota_bytes), key)


class CachedSamples:
    """A data set whose samples are cached on disk; see `cached`."""

    def __init__(self, dataset: Any, folder: Path, quota_bytes: int, key: str | None = None) -> None:
        self.dataset = dataset
        self._made_of = (folder, quota_bytes)
        if key is None:
            remove_left(folder)  # remove old samples before the BlockCache counts the folder's bytes
        self._cache = BlockCache(folder, quota_bytes, tell)
        identity = self._identified(key)
        if key is not None:
            self._key = f"map-{identity}"
            return
        self._key = f"map-of-{_host()}-{os.getpid()}-{_began(os.getpid())}-{secrets.token_hex(8)}"
        weakref.finalize(self, _remove, folder / self._key, os.getpid())

    def _identified(self, key: str | None) -> str:
        """Return a digest of the program's key, and of the data set's type, length and three samples: 16 digits."""
        count = len(self.dataset)
        if not count:
            raise ArgumentError("a data set without samples cannot be cached")
        digests = []
        for number in sorted({0, count // 2, count - 1}):
            first, again = (packed(self.dataset[number]) for _ in range(2))
            if first != again:
                raise ArgumentError(
                    f"sample {number} differs each time it is read, as with random augmentation. Cache the data set "
                    "without augmentation, and augment the cached samples"
                )
            digests.append(xxh3(first))
        kind = type(self.dataset)
        told = repr((key, kind.__module__, kind.__qualname__, count, digests))
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        """Return a sample that is equal to the sample of the original data set."""
        place = range(len(self))[number]
        return unpacked(self._cache.get(self._key, place, lambda: packed(self.dataset[place])))

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_made_of": self._made_of, "_key": self._key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._cache = BlockCache(*self._made_of, tell)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process must not remove the samples of its parent
        shutil.rmtree(folder, ignore_errors=True)


def remove_left(root: Path) -> None:
    """Remove samples that were cached without `key` by a process that has ended."""
    for each in root.iterdir() if root.is_dir() else ():
        found = _OWN.fullmatch(each.name)
        if found and found["host"] == _host() and _began(int(found["process"])) != int(found["began"]):
            remove_blocks(root, each.name)


def _host() -> str:
    """Return an identifier of this host's current boot and of this container: 16 digits."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        told = f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        told = secrets.token_hex(8)  # a unique identifier, so that no other process removes the samples
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def _began(process: int) -> int:
    """Return the start time of a process, in ticks of its host; 0 if there is no such process."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(told.rpartition(")")[2].split()[19])
