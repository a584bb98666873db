"""Parquet and HDF5: columns of samples, read by pyarrow and h5py."""

from collections import OrderedDict
from threading import RLock
from typing import Any

import numpy as np

from multiring.data.readers.limits import Limits, damage_told, library, require_size
from multiring.data.readers.source import Image, Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import StorageFile, with_endings
from multiring.errors import DataError, UnsupportedError

_KEPT_GROUPS = 4
_OPEN_FILES = 16


class ParquetSource:
    """Rows of Parquet files; a shard is a row group, which is read as a whole.

    A column that is a struct of `bytes` and `path`, as Hugging Face's data sets have them, is an image.
    """

    format = "parquet"
    reads_records = False

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        self._groups: list[tuple[str, int]] = []
        self.shards: list[Shard] = []
        names = with_endings(opening.names, ".parquet") or ([""] if opening.names == ("",) else [])
        for name in names:
            self._add(name)
        if not self.shards:
            raise DataError(f"{opening.storage.url} has no .parquet file with rows")
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)
        self.__setstate__({})

    def _file(self, name: str) -> Any:
        """Return a file, its metadata read within limits: Thrift's, for what a header claims."""
        parquet = library("pyarrow.parquet")
        size = self._storage.size(name)
        most = min(size, self._limits.index_bytes)
        with damage_told(f"{self._storage.url}/{name}", *_arrows_errors()):
            return parquet.ParquetFile(
                StorageFile(self._storage, name),
                thrift_string_size_limit=max(most, 1),
                thrift_container_size_limit=max(most, 1),
                pre_buffer=False,
            )

    def _add(self, name: str) -> None:
        what = f"{self._storage.url}/{name}"
        with damage_told(what, *_arrows_errors()):
            told = self._file(name).metadata
            for number in range(told.num_row_groups):
                group = told.row_group(number)
                where = f"{what}: row group {number}"
                require_size(where, group.total_byte_size, self._limits.group_bytes, "the limit of a row group")
                if not 0 <= group.num_rows <= self._limits.samples:
                    raise ValueError(f"row group {number} claims {group.num_rows} rows")
                if group.num_rows:
                    self._groups.append((name, number))
                    shard = Shard(name=f"{name}#{number}", size_bytes=group.total_byte_size, samples=group.num_rows)
                    self.shards.append(shard)

    def record(self, number: int) -> Record:
        """Return a row's columns: lists of numbers as arrays."""
        shard, row = self.numbering.place(number)
        table = self._table(shard)
        found: Record = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            value = column[row].as_py()
            if isinstance(value, dict) and set(value) == {"bytes", "path"} and value["bytes"] is not None:
                value = Image(value["bytes"])
            elif isinstance(value, list):
                value = np.asarray(value)
                if value.dtype.hasobject:
                    raise UnsupportedError(f"{self._storage.url}: column {name} has lists of unlike or missing values")
            found[name] = value
        return found

    def _table(self, shard: int) -> Any:
        with self._lock:
            table = self._kept.get(shard)
            if table is None:
                name, number = self._groups[shard]
                with damage_told(f"{self._storage.url}/{name}: row group {number}", *_arrows_errors()):
                    table = self._file(name).read_row_group(number, use_threads=False)
                    table.validate()
                if table.num_rows != self.shards[shard].samples:
                    raise DataError(f"{self._storage.url}/{self.shards[shard].name} has {table.num_rows} rows")
                self._kept[shard] = table
            self._kept.move_to_end(shard)
            while len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
            return table

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = RLock()


def _arrows_errors() -> tuple[type[BaseException], ...]:
    return (library("pyarrow").ArrowException, OSError, ValueError, OverflowError, KeyError, TypeError)


class Hdf5Source:
    """Data sets of HDF5 files, at their roots, of which the first axis numbers the samples: one a field."""

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
            raise DataError(f"{opening.storage.url}: its files have unlike data sets: {fields}")
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def _count(self, name: str) -> int:
        counts = {field: each.shape[0] for field, each in self._fields(name).items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{self._storage.url}/{name}: its data sets have unlike numbers of samples: {counts}")
        return int(next(iter(counts.values()), 0))

    def _fields(self, name: str) -> dict[str, Any]:
        """Return a file's data sets, each held against the limits."""
        with self._lock:
            found = self._files.get(name)
            if found is None:
                h5py = library("h5py")
                what = f"{self._storage.url}/{name}"
                with damage_told(what, OSError, ValueError, KeyError, RuntimeError, TypeError, OverflowError):
                    file = h5py.File(StorageFile(self._storage, name), "r")
                    found = {field: _checked(what, file, field, self._limits) for field in sorted(file)}
                self._files[name] = found
            self._files.move_to_end(name)
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
            return found

    def record(self, number: int) -> Record:
        """Return a sample of each data set."""
        shard, row = self.numbering.place(number)
        name = self.shards[shard].name
        kinds = (OSError, ValueError, KeyError, RuntimeError, TypeError)
        with self._lock, damage_told(f"{self._storage.url}/{name}: sample {row}", *kinds):
            values = {field: each[row] for field, each in self._fields(name).items()}
        return {
            field: value.decode() if isinstance(value, bytes) else value.tobytes() if _is_bytes(value) else value
            for field, value in values.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._files: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = RLock()  # HDF5's library has one of its own, which Python's threads may not wait for


def _is_bytes(value: Any) -> bool:
    return isinstance(value, np.void)


def _checked(what: str, file: Any, field: str, limits: Limits) -> Any:
    """Return a data set of an HDF5 file, unless reading it could lead elsewhere or take more than it says."""
    h5py = library("h5py")
    if not isinstance(file.get(field, getlink=True), h5py.HardLink):
        raise DataError(f"{what}: {field} is a link; want data sets that are in the file")
    found = file[field]
    if not isinstance(found, h5py.Dataset) or not found.shape:
        raise DataError(f"{what}: {field} is no data set with an axis of samples")
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
