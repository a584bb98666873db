"""Views of any library's arrays as plain memory, without a copy.

A view consists of address, shape, strides and element type. multiring accepts NumPy arrays (bfloat16 through ml_dtypes)
and any object that supports DLPack or the buffer protocol. The array must be dense and in host memory. Dense means that
the elements fill their memory without gaps. The order of the strides does not matter to collectives that treat the
array as one buffer (all_reduce, broadcast, send).
"""

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from multiring._native import DType, view
from multiring.errors import ArgumentError, UnsupportedError

DTYPES: dict[str, DType] = {name: getattr(DType, name) for name in dir(DType) if not name.startswith("_")}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name in (
        *("bool", "bfloat16", "float16", "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}  # NumPy's own `name` takes microseconds
_HOST = 1  # kDLCPU
_DEVICES = {2: "CUDA", 3: "CUDA-pinned host", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA-managed"}
# Arrays of these libraries are immutable, but DLPack would still hand out their memory as writable.
_IMMUTABLE = ("jax", "jaxlib", "tensorflow")


def numpy_dtype(kind: Any) -> np.dtype[Any]:
    """Return the NumPy element type named by `kind`.

    Args:
        kind: a type name, or any argument that `numpy.dtype` accepts. "bfloat16" gives the type of ml_dtypes.

    Raises:
        ArgumentError: multiring does not support the type.
    """
    if isinstance(kind, str) and kind in _NUMPY_DTYPES:
        return _NUMPY_DTYPES[kind]
    try:
        return _NUMPY_DTYPES[np.dtype(kind).name]
    except (TypeError, KeyError):
        raise ArgumentError(f"type {kind}: want one of {', '.join(sorted(_NUMPY_DTYPES))}") from None


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array as plain memory.

    The memory stays allocated for as long as the Buffer exists.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    owner: object = field(repr=False)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes."""
        return _NUMPY_DTYPES[self.dtype].itemsize

    @property
    def size_bytes(self) -> int:
        """The size of all elements in bytes."""
        return self.count * self.itemsize

    @property
    def layout(self) -> tuple[int, ...]:
        """The dimensions longer than 1, slowest first.

        Two arrays of equal shape and equal layout store their elements in the same order.
        """
        # The strides of an empty array are arbitrary.
        long = [dim for dim, size in enumerate(self.shape) if size > 1] if self.count else []
        return tuple(sorted(long, key=lambda dim: -self.strides[dim]))

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie in row-major order, which makes each row contiguous."""
        if len(self.shape) < 2:
            return True
        return self.layout == tuple(sorted(self.layout))


def buffer_of(array: Any, *, writes: bool) -> Buffer:
    """Return the memory of `array` as a Buffer.

    Args:
        array: a NumPy array, an object with DLPack or the buffer protocol, or a Buffer. A Buffer is returned unchecked.
        writes: whether the collective will write into the array.

    Raises:
        ArgumentError: `array` is not an array, has gaps between its elements or a foreign byte order, or is read-only
            and `writes` is set.
        UnsupportedError: the array is not in host memory.
    """
    if isinstance(array, Buffer):
        return array
    found = _of_numpy(array, writes=writes) if isinstance(array, np.ndarray) else _of_other(array, writes=writes)
    if found.dtype not in _NUMPY_DTYPES:
        raise ArgumentError(f"array of {found.dtype}: want one of {', '.join(sorted(_NUMPY_DTYPES))}")
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        return found
    expected = 1
    for dim in reversed(found.layout):
        if found.strides[dim] != expected:
            raise ArgumentError(
                f"array of shape {found.shape} and strides {found.strides} (in elements) has gaps or overlaps in "
                "memory; want a dense one, such as its copy"
            )
        expected *= found.shape[dim]
    return found


def copied(array: Any, out: Any, *, copies: bool = True) -> Buffer:
    """Copy `array` into `out` and return the memory of `out`.

    Args:
        array: as for `buffer_of`; it is only read. It may be `out` itself.
        out: an array of the same shape, element type and order of strides.
        copies: False only checks that the two arrays fit.

    Raises:
        ArgumentError: as for `buffer_of`; or the two arrays do not fit, or overlap in part.
        UnsupportedError: as for `buffer_of`.
    """
    source, target = buffer_of(array, writes=False), buffer_of(out, writes=True)
    if (source.shape, source.dtype, source.layout) != (target.shape, target.dtype, target.layout):
        raise ArgumentError(
            f"out of shape {target.shape}, {target.dtype}, strides {target.strides}: want shape {source.shape}, "
            f"{source.dtype}, with strides in the order of {source.strides}, as the array has them"
        )
    if source.address != target.address:
        if source.address < target.address + target.size_bytes and target.address < source.address + source.size_bytes:
            raise ArgumentError(
                "out shares a part of its memory with the array; want the array itself, or other memory"
            )
        if copies:
            ctypes.memmove(target.address, source.address, source.size_bytes)
    return target


def _of_numpy(array: "np.ndarray[Any, Any]", *, writes: bool) -> Buffer:
    if not array.dtype.isnative:
        raise ArgumentError(f"array of {array.dtype} in foreign byte order; want the machine's own")
    if writes and not array.flags.writeable:
        raise ArgumentError(f"array of shape {array.shape} is read-only; want one that can be written, such as a copy")
    itemsize = array.itemsize or 1
    if any(stride % itemsize for stride in array.strides):
        raise ArgumentError(f"array with strides {array.strides} (in bytes) of {array.dtype}; want a dense one")
    strides = tuple(stride // itemsize for stride in array.strides)
    name = _NAMES.get(array.dtype) or array.dtype.name
    return Buffer(array.__array_interface__["data"][0], array.shape, strides, name, array)


def _of_other(array: Any, *, writes: bool) -> Buffer:
    kind = type(array)
    if writes and is_immutable(array):
        raise ArgumentError(f"{kind.__module__}.{kind.__qualname__} is immutable; want an array that can be written")
    if hasattr(array, "__dlpack_device__"):
        device = _device_of(array)
        if device != _HOST:
            named = _DEVICES.get(device, f"DLPack device type {device}")
            raise UnsupportedError(
                f"{kind.__qualname__} is in {named} memory; want host memory, or a group of `Group.on_device` for CUDA"
            )
    elif not hasattr(array, "__dlpack__"):
        return _of_buffer(array, writes=writes)
    try:
        seen = view(array)
    except TypeError:  # the text of this error does not give the reason why the array's library refused
        raise ArgumentError(f"{kind.__qualname__} does not expose its memory: {_refusal_of(array)}") from None
    return Buffer(seen.address, tuple(seen.shape), tuple(seen.strides), seen.dtype, seen)


def is_immutable(array: Any) -> bool:
    """Return whether the array's library does not let anybody write into arrays."""
    return type(array).__module__.partition(".")[0] in _IMMUTABLE


def _device_of(array: Any) -> int:
    try:
        return int(array.__dlpack_device__()[0])
    except ValueError as error:  # raised for example for a torch meta tensor, which has no memory
        raise UnsupportedError(f"{type(array).__qualname__}: {error}") from None


def _refusal_of(array: Any) -> str:
    try:
        array.__dlpack__()
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "its __dlpack__ gives a tensor that cannot be written or has no plain type"


def _of_buffer(array: Any, *, writes: bool) -> Buffer:
    try:
        memory = memoryview(array)
    except TypeError:
        raise ArgumentError(
            f"{type(array).__qualname__} is no array; want NumPy, DLPack or the buffer protocol"
        ) from None
    if writes and memory.readonly:
        raise ArgumentError(f"{type(array).__qualname__} is read-only; want memory that can be written")
    return _of_numpy(np.asarray(memory), writes=writes)
