"""cached: any map-style data set, its samples kept on this host's disk from the first epoch on."""

import hashlib
import os
import re
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Any

from multiring.data.caching.blocks import QUOTA_BYTES, BlockCache, remove_blocks
from multiring.data.caching.samples import packed, unpacked
from multiring.data.packing.manifest import xxh3
from multiring.data.readers.opening import tell
from multiring.errors import ArgumentError
from multiring.settings import Settings
from multiring.settings import cache_folder as users_cache

_OWN = re.compile(r"map-of-(?P<host>[0-9a-f]{16})-(?P<process>\d+)-(?P<began>\d+)-[0-9a-f]{16}")


def cache_folder(settings: Settings | None = None) -> Path:
    """Return where this user's cache is: MULTIRING_DATA_CACHE, or a folder of multiring's in the user's cache."""
    chosen = (settings or Settings.from_environment()).data_cache
    return Path(chosen) if chosen else users_cache() / "data"


def cached(
    dataset: Any, cache: str | Path | None = None, *, key: str | None = None, quota_bytes: int = QUOTA_BYTES
) -> "CachedSamples":
    """Return a data set whose samples are read from this host's disk once they have been read.

    A script changes one line: `dataset = cached(dataset)`. What is kept is what the data set gives, so that random
    augmentation belongs on top of it: a data set that gives something else each time is refused.

    Nobody can see from outside what a data set's samples depend on: its files, its labels, its program. So what is kept
    belongs to this object, and to its copies in worker processes, and is removed with it, unless `key` names the
    content.

    Args:
        dataset: with a length, and samples by number: arrays, torch's tensors, numbers, text, bytes, images of
            Pillow's, None, and tuples, lists and dicts of those. It is not changed while it is cached.
        cache: the folder; the user's own by default (MULTIRING_DATA_CACHE).
        key: names what the samples are, for instance "cifar10 224px labels-v3": ranks, jobs and later runs that give
            the same key share what is kept. Give another one whenever a sample changes. Also in the key are the data
            set's type, its length, and its first, middle and last sample.
        quota_bytes: the most that the folder may hold.

    Raises:
        ArgumentError: it has no samples, or a sample is another one when it is read again.
        DataError: a sample holds what cannot be kept.
    """
    return CachedSamples(dataset, Path(cache) if cache is not None else cache_folder(), quota_bytes, key)


class CachedSamples:
    """A data set, its samples kept; see `cached`."""

    def __init__(self, dataset: Any, folder: Path, quota_bytes: int, key: str | None = None) -> None:
        self.dataset = dataset
        self._made_of = (folder, quota_bytes)
        if key is None:
            remove_left(folder)  # before it is counted what the folder holds
        self._cache = BlockCache(folder, quota_bytes, tell)
        identity = self._identified(key)
        if key is not None:
            self._key = f"map-{identity}"
            return
        self._key = f"map-of-{_host()}-{os.getpid()}-{_began(os.getpid())}-{secrets.token_hex(8)}"
        weakref.finalize(self, _remove, folder / self._key, os.getpid())

    def _identified(self, key: str | None) -> str:
        """Return 16 digits that say the program's key, the data set's type and length, and three samples of it."""
        count = len(self.dataset)
        if not count:
            raise ArgumentError("a data set without samples cannot be cached")
        digests = []
        for number in sorted({0, count // 2, count - 1}):
            first, again = (packed(self.dataset[number]) for _ in range(2))
            if first != again:
                raise ArgumentError(
                    f"sample {number} is another one each time it is read: random augmentation. Cache the data set "
                    "below it, and augment what comes out"
                )
            digests.append(xxh3(first))
        kind = type(self.dataset)
        told = repr((key, kind.__module__, kind.__qualname__, count, digests))
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        """Return a sample, equal to what the data set gives."""
        place = range(len(self))[number]
        return unpacked(self._cache.get(self._key, place, lambda: packed(self.dataset[place])))

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_made_of": self._made_of, "_key": self._key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._cache = BlockCache(*self._made_of, tell)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a fork's copy leaves alone what others use
        shutil.rmtree(folder, ignore_errors=True)


def remove_left(root: Path) -> None:
    """Remove samples that ended processes of this host kept for themselves: some were killed before they could."""
    for each in root.iterdir() if root.is_dir() else ():
        found = _OWN.fullmatch(each.name)
        if found and found["host"] == _host() and _began(int(found["process"])) != int(found["began"]):
            remove_blocks(root, each.name)


def _host() -> str:
    """Return 16 digits that tell this host, since it was started, and container from others that use the folder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        told = f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        told = secrets.token_hex(8)  # nobody else's, so that nobody removes it
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def _began(process: int) -> int:
    """Return when a process began, in ticks of its host; 0 where there is none."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(told.rpartition(")")[2].split()[19])
