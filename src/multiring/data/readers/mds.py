"""Read MDS, the shards of MosaicML Streaming: an index in JSON, and files that begin with a table of offsets.

A shard has uint32 samples, uint32 begins[samples + 1], a description, and the samples. A sample has the uint32 size of
each column without a fixed size, and then the columns. All numbers are little-endian.

Source of the format: github.com/mosaicml/streaming, streaming/base/format/mds.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from multiring._forks import ForkSafeLock
from multiring.data.readers.limits import (
    Limits,
    damage_told,
    library,
    refuse_pickle,
    require_inside,
    require_size,
)
from multiring.data.readers.source import Image, Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError, UnsupportedError

INDEX = "index.json"
_KEPT = 4  # decompressed shards that are kept in memory
_NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}


def _number(kind: str, data: bytes) -> Any:
    (value,) = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
    return value


def _array(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<")).reshape(shape)


def decoder_of(what: str, encoding: str) -> Callable[[bytes], Any]:
    """Return the function that decodes a column's bytes.

    Raises:
        DataError: the encoding is pickle.
        UnsupportedError: the encoding is unknown.
    """
    known: dict[str, Callable[[bytes], Any]] = {
        "bytes": bytes,
        "str": bytes.decode,
        "int": partial(_number, "int64"),
        "str_int": int,
        "str_float": float,
        "json": json.loads,
        **dict.fromkeys(("jpeg", "png"), Image),
        **{kind: partial(_number, kind) for kind in _NUMBERS},
    }
    if encoding == "pkl":
        refuse_pickle(what, "a column in encoding pkl")
    if encoding in known:
        return known[encoding]
    parts = encoding.split(":")
    if len(parts) == 3 and parts[0] == "ndarray" and parts[1] in _NUMBERS:
        with damage_told(what, ValueError):
            return partial(_array, parts[1], tuple(int(each) for each in parts[2].split(",")))
    raise UnsupportedError(
        f"{what}: columns in encoding {encoding!r} are not supported; want one of {sorted(known)} or ndarray:type:shape"
    )


class _MdsShard:
    """A shard's entry in the index, checked against the shard's file."""

    def __init__(self, storage: Storage, told: dict[str, Any], limits: Limits) -> None:
        self._storage, self._limits = storage, limits
        raw, packed = told["raw_data"], told.get("zip_data")
        self.name = require_inside(storage.url, str((packed or raw)["basename"]))
        self.what = f"{storage.url}/{self.name}"
        self.compression = str(told.get("compression")).partition(":")[0] if packed else ""
        self.samples = int(told["samples"])
        self.raw_bytes = int(raw["bytes"])
        self.size_bytes = storage.size(self.name)
        if told.get("format") != "mds" or self.compression not in {"", "zstd"}:
            said = f"format {told.get('format')}, compression {self.compression or None}"
            raise UnsupportedError(f"{self.what}: {said}; want format mds, with compression zstd or none")
        if self.size_bytes != int((packed or raw)["bytes"]):
            raise DataError(f"{self.what} has {self.size_bytes} bytes, but its index says {(packed or raw)['bytes']}")
        if self.compression:
            require_size(self.what, self.raw_bytes, limits.group_bytes, "the limit for data that is unpacked at once")
        if not 0 <= self.samples <= self.raw_bytes // 4:
            raise DataError(f"{self.what} of {self.raw_bytes} bytes claims {self.samples} samples")
        names, encodings, sizes = told["column_names"], told["column_encodings"], told["column_sizes"]
        if not len(names) == len(encodings) == len(sizes):
            raise DataError(f"{self.what}: {len(names)} columns, {len(encodings)} encodings, {len(sizes)} sizes")
        self.columns = [
            (str(name), decoder_of(self.what, str(encoding)), None if size is None else int(size))
            for name, encoding, size in zip(names, encodings, sizes, strict=True)
        ]

    def unpacked(self) -> bytes | None:
        """Return the decompressed shard, or None if the shard is not compressed."""
        if not self.compression:
            return None
        zstandard = library("zstandard")
        data = read(self._storage, self.name)
        with damage_told(self.what, zstandard.ZstdError, ValueError):
            claimed = zstandard.frame_content_size(data)
            if claimed not in {-1, self.raw_bytes}:
                raise ValueError(f"it declares {claimed} decompressed bytes, but its index {self.raw_bytes}")
            # A file that declares no size could decompress to any size. Read at most one byte more than the index
            # declares.
            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as stream:
                found: bytes = stream.read(self.raw_bytes + 1)
        if len(found) != self.raw_bytes:
            raise DataError(f"{self.what} unpacks to {len(found)} bytes or more, but its index says {self.raw_bytes}")
        return found

    def begins(self, data: bytes | None) -> "np.ndarray[Any, Any]":
        """Return the offset of each sample, and the end of the last: (samples + 1,)."""
        table = self._piece(data, 0, 4 * (self.samples + 2))
        (count,), found = np.frombuffer(table[:4], "<u4"), np.frombuffer(table[4:], "<u4").astype(np.int64)
        if count != self.samples or (np.diff(found) < 0).any() or found[0] < len(table) or found[-1] > self.raw_bytes:
            raise DataError(f"{self.what}: its table of {count} samples is damaged; the index says {self.samples}")
        return found

    def _piece(self, data: bytes | None, begin: int, end: int) -> bytes:
        if end > self.raw_bytes:
            raise DataError(f"{self.what} has {self.raw_bytes} bytes; bytes {begin} to {end} are needed")
        return read(self._storage, self.name, begin, end) if data is None else data[begin:end]

    def record(self, data: bytes | None, begin: int, end: int) -> Record:
        """Return the sample in the bytes `begin` to `end` of the shard.

        `data` is the result of `unpacked`.
        """
        require_size(f"{self.what}: a sample", end - begin, self._limits.record_bytes, "the limit of a record")
        sample = self._piece(data, begin, end)
        varying = sum(size is None for _, _, size in self.columns)
        with damage_told(self.what, ValueError, RecursionError, TypeError, UnicodeError):
            sizes = iter(np.frombuffer(sample[: 4 * varying], "<u4", varying).tolist())
            place, found = 4 * varying, {}
            for name, decode, fixed in self.columns:
                size = next(sizes) if fixed is None else fixed
                if not 0 <= size <= len(sample) - place:
                    raise ValueError(f"column {name} claims {size} bytes of {len(sample) - place}")
                found[name] = decode(sample[place : place + size])
                place += size
        return found


class MdsSource:
    """The samples of MDS shards."""

    format = "mds"

    def __init__(self, opening: Opening) -> None:
        storage = opening.storage
        require_size(f"{storage.url}/{INDEX}", storage.size(INDEX), opening.limits.index_bytes, "the limit")
        kinds = (ValueError, KeyError, TypeError, RecursionError, AttributeError)
        with damage_told(f"{storage.url}/{INDEX}", *kinds):
            told = json.loads(read(storage, INDEX))
            self._shards = [_MdsShard(storage, each, opening.limits) for each in told["shards"]]
        self._shards = [each for each in self._shards if each.samples]
        if not self._shards:
            raise DataError(f"{storage.url}/{INDEX} lists no samples")
        self.shards = [Shard(name=each.name, size_bytes=each.size_bytes, samples=each.samples) for each in self._shards]
        self.reads_records = not any(each.compression for each in self._shards)
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)
        self._kept: OrderedDict[int, tuple[bytes | None, Any]] = OrderedDict()
        self._lock = ForkSafeLock()

    def record(self, number: int) -> Record:
        """Return a sample's columns."""
        shard, row = self.numbering.place(number)
        data, begins = self._table(shard)
        return self._shards[shard].record(data, int(begins[row]), int(begins[row + 1]))

    def _table(self, shard: int) -> tuple[bytes | None, Any]:
        with self._lock:
            found = self._kept.get(shard)
            if found is not None:
                self._kept.move_to_end(shard)
                return found
        data = self._shards[shard].unpacked()
        found = (data, self._shards[shard].begins(data))
        with self._lock:
            self._kept[shard] = found
            # Count only decompressed shards, because tables without shards are small.
            while sum(each[0] is not None for each in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_kept": OrderedDict(), "_lock": ForkSafeLock()}
