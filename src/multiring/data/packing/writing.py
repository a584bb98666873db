"""Make a pack: write it to a temporary folder, sync it to the disk, and rename the folder to its final name."""

import io
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from multiring.data.packing.casting import ChannelStatistics, HalfPrecision
from multiring.data.readers.arrays import require_storable
from multiring.data.readers.limits import library
from multiring.data.readers.manifest import BLOCK_BYTES, BLOCKS, INDEX, MANIFEST, Field, Manifest, ShardEntry, xxh3
from multiring.data.readers.source import Image, Record, Source
from multiring.errors import ArgumentError, DataError

SHARD_BYTES = 64 << 20
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_NOTED = 100  # the most left-out samples whose numbers the manifest lists
_RECORD = 512
_KEY_DIGITS = 10
_ENDINGS = {"image": "img", "array": "npy", "number": "cls", "text": "txt", "json": "json", "bytes": "bin"}
_MAGICS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}

Progress = Callable[[int, int], None]  # called with the samples done and the bytes written


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """Options for making a pack."""

    shard_bytes: int = SHARD_BYTES
    to_float16: bool = False
    channel_axis: int = 0
    order: Sequence[int] | None = None  # the order in which samples are stored; by default the source's order
    # Called for a sample that cannot be packed; the sample is left out. With None, such a sample is an error.
    on_bad: Callable[[int, DataError], None] | None = None
    check: Callable[[int, Record], None] | None = None  # raises DataError for a sample that cannot be decoded


def kind_of(value: Any) -> str:
    """Return the kind of field that stores a value, one of `KINDS`."""
    kinds = ((Image, "image"), (np.ndarray, "array"), (str, "text"), (bytes, "bytes"), (dict | list, "json"))
    for kind, name in kinds:
        if isinstance(value, kind):
            return name
    if isinstance(value, bool | int | np.integer | np.bool_) and _LEAST <= int(value) <= _MOST:
        return "number"
    if isinstance(value, float | complex | np.generic):
        return "array"
    told = f"{type(value).__name__} of more than 64 bits" if isinstance(value, int) else type(value).__name__
    raise DataError(f"a field holds a {told}, which cannot be packed; want arrays, numbers, text, bytes")


def encoded(what: str, kind: str, value: Any) -> bytes:
    """Return the bytes of a field as they are stored in a shard.

    Args:
        what: the field's name, for error messages.
        kind: the result of `kind_of`.
        value: the field's value.

    Raises:
        DataError: reading the bytes would give another value or another type.
    """
    if kind == "image":
        data: bytes = value.data
        return data
    with _told(what):
        if kind == "array":
            array = np.ma.asanyarray(value) if isinstance(value, np.ma.MaskedArray) else np.asarray(value, order="C")
            require_storable(what, array)
            file = io.BytesIO()
            np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
            return file.getvalue()
        if kind == "number":
            return str(int(value)).encode()
        if kind == "json":
            text = json.dumps(value, allow_nan=False)
            if not _alike(json.loads(text), value):
                raise ValueError("it has values that JSON cannot store, such as tuples, or keys that are not text")
            return text.encode()
        return value.encode() if isinstance(value, str) else bytes(value)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn exceptions into a DataError that says that `what` cannot be packed."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{what} cannot be packed: {type(error).__name__}: {str(error)[:300]}") from error


def _alike(first: Any, second: Any) -> bool:
    """Return whether two values are equal and have the same types, also in nested lists and dicts."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_alike(value, second[key]) for key, value in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_alike, first, second))
    return bool(first == second)


class _ShardWriter:
    """Writes a shard, and computes the check sums of its blocks."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._name = path.name
        self._whole = library("xxhash").xxh3_64()
        self._rest = bytearray()
        self.size = 0
        self.samples = 0
        self.blocks: list[int] = []

    def add(self, name: str, data: bytes) -> int:
        """Add a file, and return the offset of its bytes in the shard."""
        head = tarfile.TarInfo(name)
        head.size = len(data)
        self._write(head.tobuf(tarfile.USTAR_FORMAT if len(name.encode()) < 100 else tarfile.PAX_FORMAT))
        begin = self.size
        self._write(data)
        self._write(bytes(-len(data) % _RECORD))
        return begin

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._whole.update(data)
        self.size += len(data)
        self._rest += data
        while len(self._rest) >= BLOCK_BYTES:
            self.blocks.append(xxh3(memoryview(self._rest)[:BLOCK_BYTES].toreadonly().tobytes()))
            del self._rest[:BLOCK_BYTES]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def finish(self) -> ShardEntry:
        """Complete the shard, sync it to the disk, and return its manifest entry."""
        self._write(bytes(2 * _RECORD))
        if self._rest:
            self.blocks.append(xxh3(bytes(self._rest)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = self._whole.intdigest()
        return ShardEntry(name=self._name, size_bytes=self.size, samples=self.samples, xxh3=digest)


def _number_type(value: Any) -> str:
    """Return a number's type for the manifest; empty for Python's int."""
    if isinstance(value, bool):
        return "bool"
    return value.dtype.str if isinstance(value, np.generic) else ""


def _ending(field: Field, data: bytes) -> str:
    """Return the second part of a file's name, after the sample's key: the field's name, and an ending for its type."""
    ending = _ENDINGS[field.kind]
    if field.kind == "image":
        ending = next((end for magic, end in _MAGICS.items() if data.startswith(magic)), ending)
    return field.name if field.name == ending else f"{field.name}.{ending}"


class _Packer:
    """Writes records into shards."""

    def __init__(self, folder: Path, options: PackOptions, halves: dict[str, HalfPrecision]) -> None:
        self._folder, self._options, self._halves = folder, options, halves
        self._shard: _ShardWriter | None = None
        self._entries: list[ShardEntry] = []
        self._blocks: list[int] = []
        self._rows: list[list[int]] = []
        self._fields: dict[str, Field] = {}
        self.written = 0

    def add(self, what: str, record: Record) -> None:
        """Write a sample.

        Raises:
            DataError: the fields or their kinds differ from those of the first sample.
        """
        kinds = {name: kind_of(value) for name, value in record.items()}
        if not self._fields:
            self._fields = {name: self._field(name, kind, record[name]) for name, kind in kinds.items()}
        if kinds != {name: each.kind for name, each in self._fields.items()}:
            raise DataError(
                f"{what} has the fields {kinds}, but the first sample has fields of the kinds "
                f"{[each.kind for each in self._fields.values()]}; want the same fields in all samples"
            )
        # Encode all fields before writing: a sample that cannot be packed then leaves no file in the shard.
        made = {name: self._made(f"{what}: {name}", name, kind, record[name]) for name, kind in kinds.items()}
        shard = self._opened()
        key = f"{len(self._rows):0{_KEY_DIGITS}d}"
        row: list[int] = []
        # Write the fields in the first sample's order; this sample may have them in another order.
        for name, field in self._fields.items():
            value, data = made[name]
            begin = shard.add(f"{key}.{_ending(field, data)}", data)
            row += [int(value)] if field.kind == "number" else [begin, len(data)]
        shard.samples += 1
        self._rows.append(row)
        if shard.size >= self._options.shard_bytes:
            self._close()

    def _made(self, what: str, name: str, kind: str, value: Any) -> tuple[Any, bytes]:
        """Return a value as it is packed, and its bytes; drop the field's type and shape if this value has others."""
        if name in self._halves:
            value = self._halves[name].cast(what, value)
        data = encoded(what, kind, value)
        field = self._fields[name]
        if field.shape is not None and (value.shape != field.shape or value.dtype.str != field.dtype):
            self._fields[name] = replace(field, shape=None, dtype="", header_bytes=0)
        if kind == "number" and field.dtype and _number_type(value) != field.dtype:
            raise DataError(
                f"{what} is a {_number_type(value) or 'Python int'}, but in the first sample it is a {field.dtype}: "
                "want one type"
            )
        if kind == "number" and not field.dtype and _number_type(value):
            raise DataError(
                f"{what} is a {_number_type(value)}, but in the first sample it is a Python int: want one type"
            )
        return value, data

    def _field(self, name: str, kind: str, value: Any) -> Field:
        if "." in name or "/" in name or not name:
            raise DataError(f"a field is named {name!r}: want a name without dots and slashes")
        if kind == "number":
            return Field(name=name, kind=kind, dtype=_number_type(value))
        # NumPy's short name does not describe every type, for instance a type with several columns. The full type is in
        # each array's own header.
        if kind != "array" or not isinstance(value, np.ndarray) or np.dtype(value.dtype.str) != value.dtype:
            return Field(name=name, kind=kind)
        if name in self._halves:
            value = np.empty(value.shape, np.float16)
        header = len(encoded(name, kind, value)) - value.nbytes
        return Field(name=name, kind=kind, dtype=value.dtype.str, shape=value.shape, header_bytes=header)

    def _opened(self) -> _ShardWriter:
        if self._shard is None:
            self._shard = _ShardWriter(self._folder / f"shard-{len(self._entries):05d}.tar")
        return self._shard

    def _close(self) -> None:
        if self._shard is not None:
            self._entries.append(self._shard.finish())
            self._blocks += self._shard.blocks
            self.written += self._shard.size
            self._shard = None

    def close(self) -> None:
        """Close the unfinished shard, if there is one."""
        if self._shard is not None:
            self._shard.close()

    def finish(self, note: str, statistics: dict[str, Any]) -> Manifest:
        """Complete the last shard, and write index, check sums and manifest."""
        self._close()
        if not self._entries:
            raise DataError("no sample to pack")
        fields = tuple(replace(each, statistics=statistics.get(name, {})) for name, each in self._fields.items())
        index = encoded(INDEX, "array", np.array(self._rows, np.int64).reshape(len(self._rows), -1))
        blocks = encoded(BLOCKS, "array", np.array(self._blocks, np.uint64))
        manifest = Manifest(
            fields=fields,
            shards=tuple(self._entries),
            index_xxh3=xxh3(index),
            blocks_xxh3=xxh3(blocks),
            note=note,
            decoded=self._options.check is not None and any(each.kind == "image" for each in fields),
        )
        for name, data in ((INDEX, index), (BLOCKS, blocks), (MANIFEST, manifest.text().encode())):
            _write(self._folder / name, data)
        return manifest


def pack(source: Source, samples: int, target: Path, options: PackOptions, progress: Progress) -> Manifest:
    """Make a pack of a data set's samples.

    If the function fails, nothing is left at `target`.

    Args:
        source: the samples.
        samples: the number of samples.
        target: the pack's folder, which must not exist.
        options: the options.
        progress: called after each sample with the samples done and the bytes written.

    Raises:
        ArgumentError: `target` exists.
        DataError: a sample cannot be read or packed.
        OSError: the disk is full or fails.
    """
    if target.exists():
        raise ArgumentError(f"{target} exists already; name a new folder, or remove this one")
    order = range(samples) if options.order is None else options.order
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.new-{secrets.token_hex(4)}")
    folder.mkdir()
    opened = ExitStack()
    try:
        statistics = _statistics(source, order, options) if options.to_float16 else {}
        halves = {name: HalfPrecision(each, options.channel_axis) for name, each in statistics.items()}
        packer = _Packer(folder, options, halves)
        opened.callback(packer.close)
        left_out: list[int] = []
        for done, number in enumerate(order, 1):
            if not _packed(packer, source, int(number), options):
                left_out.append(int(number))
            progress(done, packer.written)
        told = {name: each.told() | halves[name].told() for name, each in statistics.items()}
        manifest = packer.finish(f"of {source.format} {source.digest}{_note_of(left_out)}", told)
        _sync(folder)
        folder.rename(target)
        _sync(target.parent)
    except BaseException:
        opened.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return manifest


def _packed(packer: _Packer, source: Source, number: int, options: PackOptions) -> bool:
    """Pack a sample; return False if it is left out because it cannot be read, decoded or packed."""
    try:
        record = source.record(number)
        if options.check is not None:
            options.check(number, record)
        packer.add(f"sample {number}", record)
    except DataError as error:
        if options.on_bad is None:
            raise
        options.on_bad(number, error)
        return False
    return True


def _note_of(left_out: Sequence[int]) -> str:
    """Return the manifest's note on the samples that were left out."""
    if not left_out:
        return ""
    shown = ", ".join(map(str, left_out[:_NOTED]))
    what = "sample" if len(left_out) == 1 else "samples"
    return f"; left out {len(left_out)} {what}: {shown}{', ...' if len(left_out) > _NOTED else ''}"


def _read(source: Source, number: int, options: PackOptions) -> Record | None:
    try:
        return source.record(number)
    except DataError as error:
        if options.on_bad is None:
            raise
        options.on_bad(number, error)
        return None


def _statistics(source: Source, order: Sequence[int], options: PackOptions) -> dict[str, ChannelStatistics]:
    found: dict[str, ChannelStatistics] = {}
    for number in order:
        for name, value in (_read(source, int(number), replace(options, on_bad=lambda *_: None)) or {}).items():
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim:
                if name not in found:
                    found[name] = ChannelStatistics(options.channel_axis)
                found[name].add(f"sample {number}: {name}", value)
    if not found:
        raise ArgumentError("to float16: the samples have no arrays of floating-point numbers")
    return found


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
