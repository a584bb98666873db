"""Read HDF5 files with h5py: data sets of numbers, text and records at a file's root."""

import atexit
import contextlib
import weakref
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np

from multiring._forks import ForkSafeLock
from multiring.data.readers.limits import Limits, damage_told, library, require_size
from multiring.data.readers.source import Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import StorageFile, with_endings
from multiring.errors import DataError, StateError

_OPEN_FILES = 16
_PIECE = 1 << 20
_MOST_TIMES = 1032  # deflate's largest ratio of decompressed to compressed size
_END_S = 10.0  # seconds to wait for a running read when the process exits
_ERRORS = (OSError, ValueError, KeyError, RuntimeError, TypeError, OverflowError, zlib.error)


class _Ending:
    """Closes open files before the process exits.

    The HDF5 library closes remaining files after Python's interpreter has exited, and that would call Python code.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._sources: weakref.WeakSet[Hdf5Source] = weakref.WeakSet()
        self._lock = ForkSafeLock()

    def watch(self, source: "Hdf5Source") -> None:
        """Close a source's files when the process exits."""
        with self._lock:
            if not len(self._sources):
                atexit.unregister(self._close)
                atexit.register(self._close)  # as late as possible: functions run in reverse order of registration
            self._sources.add(source)

    def _close(self) -> None:
        self.has_begun = True  # threads that are still reading open no file from now on
        for each in list(self._sources):
            each.close()


_ending = _Ending()


class Hdf5Source:
    """Samples in HDF5 files.

    Each data set at a file's root is a field; its first axis is the samples.

    Text is decoded as UTF-8. Records (compound types) have h5py's types; opaque values become bytes.
    """

    format = "hdf5"
    reads_records = True

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        self.__setstate__({})
        names = with_endings(opening.names, ".h5", ".hdf5") or ([""] if opening.names == ("",) else [])
        counts = [(name, self._count(name)) for name in names]
        self.shards = [
            Shard(name=name, size_bytes=self._storage.size(name), samples=count) for name, count in counts if count
        ]
        if not self.shards:
            raise DataError(f"{opening.storage.url} has no HDF5 file with samples")
        fields = {name: set(self._fields(name)) for name in (each.name for each in self.shards)}
        if len({frozenset(each) for each in fields.values()}) > 1:
            raise DataError(f"{opening.storage.url}: its files have different data sets: {fields}")
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def _count(self, name: str) -> int:
        counts = {field: each.shape[0] for field, each in self._fields(name).items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{self._storage.url}/{name}: its data sets have different numbers of samples: {counts}")
        return int(next(iter(counts.values()), 0))

    def _fields(self, name: str) -> dict[str, Any]:
        """Return a file's data sets, checked against the limits."""
        with self._lock:
            found = self._files.get(name)
            if found is None:
                if _ending.has_begun:
                    raise StateError(f"{self._storage.url}/{name} cannot be opened: the process is exiting")
                h5py = library("h5py")
                what = f"{self._storage.url}/{name}"
                with damage_told(what, *_ERRORS):
                    file = h5py.File(StorageFile(self._storage, name), "r")
                    try:
                        fields = {field: _checked(what, file, field, self._limits) for field in sorted(file)}
                    except BaseException:
                        file.close()
                        raise
                found = self._files[name] = (file, fields)
                _ending.watch(self)
            self._files.move_to_end(name)
            while len(self._files) > _OPEN_FILES:
                _, (oldest, _) = self._files.popitem(last=False)
                oldest.close()
            return found[1]

    def record(self, number: int) -> Record:
        """Return a sample's value from each data set.

        Raises:
            DataError: a value cannot be read, or a text is not UTF-8.
        """
        shard, row = self.numbering.place(number)
        name = self.shards[shard].name
        what = f"{self._storage.url}/{name}: sample {row}"
        with self._lock, damage_told(what, *_ERRORS):
            fields = self._fields(name)
            for field, each in fields.items():
                self._require_chunks(name, f"{what}: {field}", each, row)
            values = {field: each[row] for field, each in fields.items()}
        found: Record = {}
        for field, value in values.items():
            with damage_told(f"{what}: {field}", ValueError):
                found[field] = _plain(value)
        return found

    def _require_chunks(self, name: str, what: str, data_set: Any, row: int) -> None:
        """Raise DataError if a sample's chunk decompresses to more bytes than declared: HDF5 would allocate them."""
        if data_set.compression != "gzip":
            return
        largest = max(self._limits.record_bytes, 1)
        counts = [-(-size // chunk) for size, chunk in zip(data_set.shape[1:], data_set.chunks[1:], strict=True)]
        for place in np.ndindex(*counts):
            begin = (row, *(number * chunk for number, chunk in zip(place, data_set.chunks[1:], strict=True)))
            told = data_set.id.get_chunk_info_by_coord(begin)
            # Skip chunks that are too small to exceed the limit, and chunks that have been checked before.
            if told.byte_offset is None or told.size * _MOST_TIMES <= largest:
                continue
            if (name, told.byte_offset) not in self._unpacked:
                _require_chunk(what, data_set, told.chunk_offset)
                self._unpacked.add((name, told.byte_offset))

    def close(self) -> None:
        """Close the open files; the next read opens them again."""
        # If a read hangs because its source hangs, the process must be able to exit.
        if not self._lock.acquire(_END_S):
            return
        try:
            while self._files:
                _, (file, _) = self._files.popitem()
                with contextlib.suppress(*_ERRORS):
                    file.close()
        finally:
            self._lock.release()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None, "_unpacked": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._files: OrderedDict[str, tuple[Any, dict[str, Any]]] = OrderedDict()
        self._unpacked: set[tuple[str, int]] = set()  # checked chunks, by file and offset
        # Python threads must not wait for the HDF5 library's own lock. h5py holds that lock during a fork. A fork
        # therefore finds the library, and the positions in its files, as they are between two calls.
        self._lock = ForkSafeLock(reentrant=True)


def _require_chunk(what: str, data_set: Any, begin: tuple[int, ...]) -> None:
    """Raise DataError if a chunk decompresses to more bytes than its declared size."""
    _, rest = data_set.id.read_direct_chunk(begin)
    left = data_set.dtype.itemsize * int(np.prod(data_set.chunks, dtype=object))
    decompressor = zlib.decompressobj()
    while rest and not decompressor.eof:
        left -= len(decompressor.decompress(rest, _PIECE))
        if left < 0:
            raise DataError(f"{what} has a chunk that unpacks to more than its size, {data_set.chunks}")
        rest = decompressor.unconsumed_tail


def _plain(value: Any) -> Any:
    """Convert h5py's value: text to str, arrays of text to lists, opaque values to bytes."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.void) and value.dtype.names is None:
        return value.tobytes()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OS":
        return _texts(value.tolist())
    return value


def _texts(value: Any) -> Any:
    return [_texts(each) for each in value] if isinstance(value, list) else _plain(value)


def _checked(what: str, file: Any, field: str, limits: Limits) -> Any:
    """Return a data set after checking that it lies in this file and that its samples and chunks are not too large."""
    h5py = library("h5py")
    if not isinstance(file.get(field, getlink=True), h5py.HardLink):
        raise DataError(f"{what}: {field} is a link; want data sets that are in the file")
    found = file[field]
    if not isinstance(found, h5py.Dataset) or not found.shape:
        raise DataError(f"{what}: {field} is not a data set whose first axis is the samples")
    if found.is_virtual or found.external:
        raise DataError(f"{what}: {field} is stored in other files; want data sets that are in the file")
    if found.dtype.hasobject and h5py.check_string_dtype(found.dtype) is None:
        raise DataError(f"{what}: {field} has references or lists of varying length; want numbers or text")
    row = found.dtype.itemsize * int(np.prod(found.shape[1:], dtype=object))
    require_size(f"{what}: a sample of {field}", row, limits.record_bytes, "the limit of a record")
    if found.chunks:
        chunk = found.dtype.itemsize * int(np.prod(found.chunks, dtype=object))
        require_size(f"{what}: a chunk of {field}", chunk, limits.record_bytes, "the limit of a record")
    return found
