"""Read NumPy's .npy files: plain arrays, without pickles."""

import io
import math
import struct
import tokenize
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._forks import ForkSafeLock
from multiring.data.readers.limits import Limits, damage_told, refuse_pickle, require_size
from multiring.data.readers.source import Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import Storage, read, with_endings
from multiring.errors import DataError

_HEADER_BYTES = 1 << 14
# NumPy parses a header as Python source; these are the exceptions that it raises for a damaged one.
_HEADERS_ERRORS = (
    ValueError,
    SyntaxError,
    TypeError,
    EOFError,
    RecursionError,
    MemoryError,
    OverflowError,
    tokenize.TokenError,
)
Array = NDArray[Any]
_one_at_a_time = ForkSafeLock()


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of an array in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # the numbers' offset in the file, in bytes
    is_fortran: bool = False  # whether the numbers are in Fortran order: contiguous along the first axis

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the array's numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def layout_of(what: str, head: bytes, size: int, limits: Limits) -> ArrayLayout:
    """Return the layout of the array in a .npy file.

    Args:
        what: the file's name for error messages.
        head: the beginning of the file.
        size: the bytes of the file.
        limits: the largest sizes that the file may declare.

    Raises:
        DataError: the file is not a .npy file, has Python objects, or does not have the bytes that its header declares.
    """
    with damage_told(what, *_HEADERS_ERRORS):
        shape, is_fortran, dtype, begin = _header(_header_bytes(head))
    if dtype.hasobject:
        refuse_pickle(what, "its array of Python objects")
    if any(each < 0 for each in shape):
        raise DataError(f"{what} has the invalid shape {shape}")
    found = ArrayLayout(dtype, tuple(shape), begin, is_fortran and len(shape) > 1)
    # Python's integers cannot overflow, so this check also rejects shapes whose size exceeds 64 bits.
    require_size(what, found.size_bytes, size - found.begin, "the rest of the file")
    if found.begin + found.size_bytes != size:
        raise DataError(f"{what} has {size} bytes, but its array ends at byte {found.begin + found.size_bytes}")
    require_size(what, found.size_bytes, limits.index_bytes << 20, "the limit")
    return found


def _header_bytes(head: bytes) -> bytes:
    """Return the part of a .npy file's header that `head` contains."""
    sizes = {1: (10, "<H"), 2: (12, "<I")}
    size, form = sizes.get(head[6] if len(head) > 6 else 0, (0, ""))
    if not size or len(head) < size:
        return head
    (length,) = struct.unpack_from(form, head, 8)
    return head[: size + length]


@lru_cache(maxsize=256)
def _header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return the shape, whether the order is Fortran's, the type, and the numbers' offset.

    Only one thread at a time may parse a header. NumPy parses a header as Python source, and in Python 3.11 concurrent
    parsers share a count of their recursion depth, which raises SystemError (python/cpython#106905).
    """
    with _one_at_a_time:
        file = io.BytesIO(head)
        version = np.lib.format.read_magic(file)
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in reads:
            raise ValueError(f"unknown version {version} of the .npy format")
        return (*reads[version](file, max_header_size=_HEADER_BYTES), file.tell())


def array_of(what: str, data: bytes | memoryview, limits: Limits) -> Array:
    """Return the array in a .npy file's bytes, as a view of them."""
    require_size(what, len(data), limits.record_bytes, "the limit of a record")
    found = layout_of(what, bytes(data[:_HEADER_BYTES]), len(data), limits)
    numbers = np.frombuffer(data, found.dtype, offset=found.begin)
    return numbers.reshape(found.shape[::-1]).T if found.is_fortran else numbers.reshape(found.shape)


def require_storable(what: str, array: Array) -> None:
    """Raise DataError if a .npy file cannot store an array's type and all its values."""
    dtype = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(f"{what} has a masked array, which .npy files cannot store: want an array without a mask")
    if dtype.hasobject:
        refuse_pickle(what, "its array of Python objects")
    try:
        back = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype))
    except (ValueError, TypeError):
        back = None
    if back != dtype or back.type is not dtype.type:
        raise DataError(
            f"{what} has an array of {dtype}, which .npy files cannot store: want float32, or its bytes as uint8 or "
            "uint16"
        )


def layout_in(storage: Storage, name: str, limits: Limits) -> ArrayLayout:
    """Return the layout of the array in a file of a storage."""
    size = storage.size(name)
    return layout_of(f"{storage.url}/{name}", read(storage, name, 0, min(size, _HEADER_BYTES)), size, limits)


def bytes_in(array: Array) -> memoryview:
    """Return the memory of an array, which must be in C order."""
    return array.reshape(-1).view(np.uint8).data


class NpySource:
    """Arrays whose first axis is the samples.

    Each file holds some samples, in the field `array`.
    """

    format = "npy"
    reads_records = True

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        names = with_endings(opening.names, ".npy") or ([""] if opening.names == ("",) else [])
        if not names:
            raise DataError(f"{opening.storage.url} has no .npy file")
        self._layouts = [layout_in(self._storage, name, opening.limits) for name in names]
        for name, each in zip(names, self._layouts, strict=True):
            if each.is_fortran:
                what = f"{opening.storage.url}/{name}"
                raise DataError(f"{what} is in Fortran order, in which no sample is contiguous; save it in C order")
        kinds = {(each.dtype, each.shape[1:]) for each in self._layouts}
        if len(kinds) > 1 or not self._layouts[0].shape:
            raise DataError(
                f"{opening.storage.url}: its arrays differ, or have no axis of samples: {sorted(map(str, kinds))}"
            )
        first = self._layouts[0]
        self._row_bytes = math.prod(first.shape[1:]) * first.dtype.itemsize
        require_size(f"{opening.storage.url}: a sample", self._row_bytes, opening.limits.record_bytes, "the limit")
        kept = [(name, each) for name, each in zip(names, self._layouts, strict=True) if each.shape[0]]
        self.shards = [
            Shard(name=name, size_bytes=self._storage.size(name), samples=each.shape[0]) for name, each in kept
        ]
        self._layouts = [each for _, each in kept]
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def record(self, number: int) -> Record:
        """Return {"array": one sample}."""
        shard, row = self.numbering.place(number)
        layout = self._layouts[shard]
        found = np.empty(layout.shape[1:], layout.dtype)
        if found.nbytes:
            begin = layout.begin + row * self._row_bytes
            self._storage.read_into(self.shards[shard].name, begin, bytes_in(found))
        return {"array": found}


class NpyFilesSource:
    """Files of one sample each, in the field `array`."""

    format = "npy-files"
    reads_records = True

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        names = with_endings(opening.names, ".npy")
        if not names:
            raise DataError(f"{opening.storage.url} has no .npy file")
        self.shards = [Shard(name=name, size_bytes=self._storage.size(name), samples=1) for name in names]
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def record(self, number: int) -> Record:
        """Return {"array": one sample, "name": the file's name}."""
        self.numbering.place(number)
        shard = self.shards[number]
        what = f"{self._storage.url}/{shard.name}"
        require_size(what, shard.size_bytes, self._limits.record_bytes, "the limit of a record")
        return {"array": array_of(what, read(self._storage, shard.name), self._limits), "name": shard.name}
