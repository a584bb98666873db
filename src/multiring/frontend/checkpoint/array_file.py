"""Named arrays in a file, as safetensors has them: streamed to it and from it, without a copy of the whole.

The package safetensors takes a copy of each array to write, and maps files to read them, which kills a process whose
file is taken away on another host. So the format, which is a header in JSON and the bytes, is read and written here.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from multiring.errors import ArgumentError
from multiring.frontend.checkpoint.arrays import BYTES, SAFETENSORS, Buffer, Outgoing, shape_of

_MOST_HEADER_BYTES = 100_000_000  # as safetensors allows
_KINDS = {each: kind for kind, each in SAFETENSORS.items()}
_SIZES = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


class Entry(NamedTuple):
    """An array in a file: its type and shape as the file has them, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def kind(self) -> str:
        """Return the type's name, as NumPy and torch have it."""
        return _KINDS.get(self.dtype, self.dtype)


def described(array: Outgoing) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape under which an array is stored; of types that safetensors lacks, its bytes."""
    if isinstance(array.kind, str) and array.kind in SAFETENSORS:
        return SAFETENSORS[array.kind], array.shape
    return BYTES, (*array.shape, array.itemsize)


def header_of(arrays: Mapping[str, Outgoing]) -> bytes:
    """Return what comes before the bytes of these arrays."""
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
    """Write a file; it is on the disk when this returns."""
    with file.open("wb", buffering=0) as opened:
        for each in data:
            for piece in each:
                view = memoryview(piece)
                while view:
                    view = view[opened.write(view) :]
        os.fsync(opened.fileno())


class ArrayFile:
    """A file of arrays that is open, so that it can be read also when its name has gone."""

    def __init__(self, opened: BinaryIO, what: str) -> None:
        """Read the header.

        Args:
            opened: the file.
            what: what errors call it.

        Raises:
            ArgumentError: it is damaged.
            OSError: it cannot be read.
        """
        self._opened = opened
        self.what = what
        size_bytes = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size_bytes - 8):
            raise ArgumentError(f"{what} is damaged: its header is said to have {length} bytes, of {size_bytes} in all")
        self._start = 8 + length
        self.header = opened.read(length)
        self.entries = entries_in(self.header, size_bytes - self._start, what)

    def read_into(self, entry: Entry, at: int, piece: memoryview) -> None:
        """Read bytes of an array from `at` on.

        Raises:
            OSError: they cannot be read.
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
    """Return the arrays of a header, in the order of their bytes; raise ArgumentError where it is damaged."""
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
            raise ArgumentError(f"{what} is damaged: {name!r} has another number of bytes than its shape says")
        end = entry.end
    if data_bytes is not None and end != data_bytes:
        raise ArgumentError(f"{what} is damaged: it has {data_bytes} bytes of arrays, and its header tells of {end}")
    return entries


def _entries(told: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    for name, each in told.items():
        begin, end = shape_of(each["data_offsets"])
        if not isinstance(each["dtype"], str):
            raise TypeError(f"type {each['dtype']!r}")
        yield name, Entry(each["dtype"], shape_of(each["shape"]), begin, end)
