"""Read and write files of named arrays in the format of safetensors, without a copy of the arrays.

The package safetensors copies each array to write it. It reads files through a memory mapping, and a mapping kills the
process if another host removes the file. This module therefore implements the format: a header in JSON, followed by the
bytes.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from multiring._frontend.checkpoint.arrays import BYTES, SAFETENSORS, Buffer, Outgoing, shape_of
from multiring.errors import ArgumentError

_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors
_KINDS = {each: kind for kind, each in SAFETENSORS.items()}
_SIZES = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


class Entry(NamedTuple):
    """An array in a file: its stored type and shape, and the range of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def kind(self) -> str:
        """Return the type's name in NumPy and torch."""
        return _KINDS.get(self.dtype, self.dtype)


def described(array: Outgoing) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape with which an array is stored.

    Types that safetensors lacks are stored as bytes.
    """
    if isinstance(array.kind, str) and array.kind in SAFETENSORS:
        return SAFETENSORS[array.kind], array.shape
    return BYTES, (*array.shape, array.itemsize)


def header_of(arrays: Mapping[str, Outgoing]) -> bytes:
    """Return the header of a file with these arrays, including the header's length."""
    told, begin = {}, 0
    for name, array in arrays.items():
        dtype, shape = described(array)
        end = begin + array.size_bytes
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(file: Path, data: Iterable[Iterable[Buffer]]) -> None:
    """Write a file, and wait until it is on the disk.

    Raises:
        OSError: the file cannot be written; the error names the file.
    """
    try:
        with file.open("wb", buffering=0) as opened:
            for each in data:
                for piece in each:
                    view = memoryview(piece)
                    while view:
                        view = view[opened.write(view) :]
            os.fsync(opened.fileno())
    except OSError as error:
        error.filename = error.filename or str(file)  # a write to a full disk does not name it
        raise


class ArrayFile:
    """An open file of arrays. It stays readable after the file was removed."""

    def __init__(self, opened: BinaryIO, what: str) -> None:
        """Read the header.

        Args:
            opened: the file.
            what: the file's name for errors.

        Raises:
            ArgumentError: the file is damaged.
            OSError: the file cannot be read.
        """
        self._opened = opened
        self.what = what
        size_bytes = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size_bytes - 8):
            raise ArgumentError(f"{what} is damaged: its header claims {length} bytes, and the file has {size_bytes}")
        self._start = 8 + length
        self.header = opened.read(length)
        self.entries = entries_in(self.header, size_bytes - self._start, what)

    def read_into(self, entry: Entry, at: int, piece: memoryview) -> None:
        """Fill `piece` with bytes of an array, from byte `at` on.

        Raises:
            OSError: the bytes cannot be read.
        """
        self._opened.seek(self._start + entry.begin + at)
        done = 0
        while done < len(piece):
            count = self._opened.readinto(piece[done:])  # type: ignore[attr-defined]
            if not count:
                raise OSError(f"{self.what} became shorter while it was read")
            done += count

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


def entries_in(header: bytes, data_bytes: int | None, what: str) -> dict[str, Entry]:
    """Return the arrays of a header, in the order of their bytes.

    Raises:
        ArgumentError: the header is damaged.
    """
    try:
        told: dict[str, Any] = json.loads(header.decode())
        told.pop("__metadata__", None)
        entries = dict(sorted(_entries(told), key=lambda each: (each[1].begin, each[1].end)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"{what} is damaged: its header cannot be read: {error}") from error
    end = 0
    for name, entry in entries.items():
        if entry.begin != end or entry.end < end:
            raise ArgumentError(f"{what} is damaged: {name!r} does not begin where the array before it ends")
        size = _SIZES.get(entry.dtype)
        if size is not None and size * math.prod(entry.shape) != entry.end - entry.begin:
            raise ArgumentError(f"{what} is damaged: {name!r} has a number of bytes that does not fit its shape")
        end = entry.end
    if data_bytes is not None and end != data_bytes:
        raise ArgumentError(f"{what} is damaged: it has {data_bytes} bytes of arrays, but its header describes {end}")
    return entries


def _entries(told: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    for name, each in told.items():
        begin, end = shape_of(each["data_offsets"])
        if not isinstance(each["dtype"], str):
            raise TypeError(f"the type {each['dtype']!r} is not text")
        yield name, Entry(each["dtype"], shape_of(each["shape"]), begin, end)
