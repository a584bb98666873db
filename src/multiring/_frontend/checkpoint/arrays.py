"""Convert arrays to names of types and bytes for a checkpoint, and back.

A type is stored as its name. If the name is incomplete (byte order, fields, units), NumPy's description is stored
instead. Saving rejects an array whose type or class could not be restored exactly.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

# An array that is not row-major in memory is copied in blocks of this size.
BLOCK_BYTES = 4 << 20
_PAGE_WORDS = 512

# The names of types in safetensors. Arrays of other types are stored as bytes.
SAFETENSORS = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
BYTES = "U8"

# The description of a type: a name, or NumPy's list of fields.
Kind: TypeAlias = "str | list[Any]"
Buffer: TypeAlias = "bytes | memoryview"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An array to write.

    kind: the description of its type.
    itemsize: the size of an element, in bytes.
    pieces: yields the array's bytes in row-major order, without a copy if possible.
    gathers: whether `pieces` is a collective, which every rank must call.
    """

    kind: Kind
    shape: tuple[int, ...]
    itemsize: int
    pieces: Callable[[], Iterator[Buffer]]
    gathers: bool = False

    @property
    def size_bytes(self) -> int:
        """Return how many bytes `pieces` yields."""
        return math.prod(self.shape) * self.itemsize


class Arrays(Protocol):
    """Access to the arrays of a framework; each adapter implements it."""

    def is_array(self, value: Any) -> bool:
        """Return whether `value` is an array of the framework, even if it cannot be saved."""

    def outgoing(self, array: Any, name: str) -> Outgoing:
        """Return the array to write.

        Raises:
            ArgumentError: the array could not be restored exactly; the message has `name`.
        """

    def empty(self, kind: Kind, shape: tuple[int, ...]) -> Any:
        """Return a new array with undefined contents; raise ArgumentError if the type is unknown."""

    def itemsize(self, array: Any) -> int:
        """Return the size of an element, in bytes."""

    def windows(self, array: Any) -> Iterator[memoryview]:
        """Yield buffers for the array's bytes in row-major order.

        The caller fills each buffer before it requests the next one.
        """


class NumpyArrays:
    """Access to NumPy's arrays, which every adapter supports besides its framework's arrays."""

    def is_array(self, value: Any) -> bool:
        """Return whether `value` is a NumPy array."""
        return isinstance(value, np.ndarray)

    def outgoing(self, array: NDArray[Any], name: str) -> Outgoing:
        """Return the array to write; raise ArgumentError if it could not be restored exactly."""
        if type(array) is not np.ndarray and type(array) is not np.memmap:
            raise ArgumentError(
                f"{shown(name)} is a {type(array).__name__}, which would be loaded as a plain array: want "
                "np.asarray(value), and its additional attributes as separate values"
            )
        return Outgoing(numpy_kind(array.dtype, name), array.shape, array.dtype.itemsize, lambda: _pieces(array))

    def empty(self, kind: Kind, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a new array with undefined contents; raise ArgumentError if the type is unknown."""
        return np.empty(shape, numpy_dtype(kind))

    def itemsize(self, array: NDArray[Any]) -> int:
        """Return the size of an element, in bytes."""
        return array.dtype.itemsize

    def windows(self, array: NDArray[Any]) -> Iterator[memoryview]:
        """Yield the memory of an array made by `empty`."""
        yield _bytes_of(array)


NUMPY = NumpyArrays()


def numpy_kind(dtype: np.dtype[Any], name: str) -> Kind:
    """Return the description of a type of NumPy or ml_dtypes.

    Raises:
        ArgumentError: the type could not be restored from a description.
    """
    if dtype.hasobject or dtype.kind == "T":
        raise ArgumentError(
            f"{shown(name)} is an array of {'objects' if dtype.kind != 'T' else 'strings of any length'}, whose memory "
            "holds pointers: want numbers, or a list of strings"
        )
    if dtype.type in {np.longdouble, np.clongdouble}:
        raise ArgumentError(
            f"{shown(name)} is of type {dtype.name}, whose bits differ between processors: want "
            f"{'float64' if dtype.kind == 'f' else 'complex128'}"
        )
    kind: Kind = dtype.name
    if not _is_named(dtype):
        kind = json.loads(json.dumps(np.lib.format.dtype_to_descr(dtype)))
    try:
        found: np.dtype[Any] | None = numpy_dtype(kind)
    except ArgumentError:
        found = None
    if found != dtype:
        raise ArgumentError(
            f"{shown(name)} is of type {dtype}, which cannot be described: want plain fields and numbers"
        )
    return kind


def _is_named(dtype: np.dtype[Any]) -> bool:
    """Return whether the type's name describes the type completely."""
    if isinstance(getattr(ml_dtypes, dtype.name, None), type):
        return bool(_of_ml_dtypes(dtype.name) == dtype)
    return dtype.kind in "biufc" and dtype.isnative


def numpy_dtype(kind: Kind) -> np.dtype[Any]:
    """Return the type for a description made by `numpy_kind`.

    Raises:
        ArgumentError: this version of NumPy does not have the type.
    """
    try:
        if isinstance(kind, str) and isinstance(getattr(ml_dtypes, kind, None), type):
            return _of_ml_dtypes(kind)
        found = np.dtype(kind) if isinstance(kind, str) else np.dtype(_fields(kind))
    except (TypeError, ValueError, SyntaxError) as error:
        raise ArgumentError(
            f"the checkpoint has arrays of type {str(kind)[:80]!r}, which NumPy {np.__version__} does not know: use "
            "the package versions that saved it"
        ) from error
    if found.hasobject:
        raise ArgumentError(f"the checkpoint is damaged: arrays of type {str(kind)[:80]!r} cannot be stored")
    return found


def _of_ml_dtypes(kind: str) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, kind))
    return found


def _fields(told: Any) -> Any:
    """Return NumPy's description of fields. JSON has turned its tuples into lists; turn them back."""
    if isinstance(told, str):
        return told
    fields = []
    for name, inner, *shape in told:
        title = tuple(name) if isinstance(name, list) else name
        fields.append((title, _fields(inner), *map(tuple, shape)))
    return fields


def blocks_of(array: Any, itemsize: int) -> Iterator[Any]:
    """Yield parts, of at most BLOCK_BYTES, of a NumPy or torch array in row-major order."""
    shape = tuple(array.shape)
    size_bytes = math.prod(shape) * itemsize
    if not size_bytes:
        return
    if size_bytes <= BLOCK_BYTES or not shape:
        yield array
        return
    row_bytes = size_bytes // shape[0]
    if row_bytes > BLOCK_BYTES:
        for row in array:
            yield from blocks_of(row, itemsize)
        return
    rows = BLOCK_BYTES // row_bytes
    for first in range(0, shape[0], rows):
        yield array[first : first + rows]


def _pieces(array: NDArray[Any]) -> Iterator[Buffer]:
    if array.flags.c_contiguous:
        if array.nbytes:
            yield _bytes_of(array)
        return
    # All blocks share one buffer. A new buffer per block would fragment the memory, at worst by the size of the array.
    scratch = np.empty(0, array.dtype)
    for block in blocks_of(array, array.dtype.itemsize):
        if scratch.size < block.size:
            scratch = np.empty(block.size, array.dtype)
        filled = scratch[: block.size].reshape(block.shape)
        filled[...] = block
        yield _bytes_of(filled)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    if not array.nbytes:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data


def scalar_bytes(value: np.generic) -> bytes:
    """Return the bytes of a NumPy scalar."""
    return np.asarray(value, value.dtype).tobytes()


def scalar_of(kind: Kind, data: bytes) -> Any:
    """Return a NumPy scalar made of `data`; raise ValueError if the number of bytes is wrong."""
    array = np.empty(1, numpy_dtype(kind))
    if array.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes do not make a {kind}")
    memory = _bytes_of(array)
    memory[:] = data
    return array[0]


def shown(name: str) -> str:
    """Return a name for errors: shortened, and with printable characters only."""
    cut = name if len(name) <= 120 else f"{name[:80]}...{name[-30:]}"
    return cut if cut.isprintable() else ascii(cut)


class WordSum:
    """A checksum of bytes, as fast as memory can be read.

    It sums little-endian words of 64 bits. Each word is multiplied by an odd number, which differs between pages of
    4 KiB. The sum changes if any single word changes, or if pages are swapped. It does not depend on the order of the
    words within a page.
    """

    def __init__(self) -> None:
        self._total = 0
        self._words = 0  # the number of words added
        self._left = b""  # the bytes of an incomplete word

    def add(self, data: Buffer) -> None:
        """Add the next bytes to the sum."""
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        if self._left:
            taken = min(8 - len(self._left), len(view))
            self._left += bytes(view[:taken])
            view = view[taken:]
            if len(self._left) < 8:
                return
            self._add(np.frombuffer(self._left, "<u8"))
        whole = len(view) & ~7
        if whole:
            self._add(np.frombuffer(view[:whole], "<u8"))
        self._left = bytes(view[whole:])

    def _add(self, words: NDArray[np.uint64]) -> None:
        begun = min(-self._words % _PAGE_WORDS, len(words))  # the words that complete a page
        pages = (len(words) - begun) // _PAGE_WORDS
        end = begun + pages * _PAGE_WORDS
        if begun:
            self._add_to_page(words[:begun])
        if pages:
            sums = words[begun:end].reshape(pages, _PAGE_WORDS).sum(axis=1, dtype=np.uint64)
            numbers = self._factor() + 2 * np.arange(pages, dtype=np.uint64)
            self._total += int((sums * numbers).sum(dtype=np.uint64))  # both numbers wrap around, like the total
            self._words += pages * _PAGE_WORDS
        if end < len(words):
            self._add_to_page(words[end:])

    def _add_to_page(self, words: NDArray[np.uint64]) -> None:
        self._total += int(words.sum(dtype=np.uint64)) * self._factor()
        self._words += len(words)

    def _factor(self) -> int:
        """Return the factor of the next word's page: an odd number that differs between pages."""
        return 2 * (self._words // _PAGE_WORDS) + 1

    def value(self) -> str:
        """Return the sum of all bytes so far, in hexadecimal."""
        last = int.from_bytes(self._left, "little") * self._factor()
        return f"{(self._total + last) % (1 << 64):016x}"


def pieces_of(view: memoryview, size_bytes: int) -> Iterator[memoryview]:
    """Yield a buffer in pieces of at most `size_bytes`."""
    for first in range(0, len(view), size_bytes):
        yield view[first : first + size_bytes]


def shape_of(told: Sequence[Any]) -> tuple[int, ...]:
    """Return a shape from JSON; raise ValueError if it is not a shape."""
    if any(type(each) is not int or each < 0 for each in told):
        raise ValueError(f"shape {told!r}")
    return tuple(told)
