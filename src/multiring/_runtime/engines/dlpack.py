"""DLPack of arrays in CUDA memory, through ctypes: exports of the engine's arrays, and imports of other libraries'.

The native core imports arrays in host memory only (arrays.py). The structures are those of dlpack.h 1.0:
https://dmlc.github.io/dlpack/latest/c_api.html
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from multiring._runtime.arrays import numpy_dtype
from multiring.errors import ArgumentError

CUDA = 2  # kDLCUDA
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_VERSION = (1, 0)
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # of NumPy's kinds
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device", c_int32),
        ("dims", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


class Imported(NamedTuple):
    """An array of another library. Its memory stays allocated as long as `capsule` exists."""

    address: int
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: row-major
    dtype: str
    is_read_only: bool
    capsule: Any


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = c_int, (ctypes.py_object, c_char_p)
# The same functions for a capsule that is being destroyed: no reference to it may be made.
_prototype = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)
_is_valid_still = _prototype(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_still = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

_exports: dict[int, tuple[Any, ...]] = {}  # what each exported structure needs, by its address


def _delete(address: int) -> None:
    """Let go of an exported array; the importing library calls this function."""
    _exports.pop(address, None)


def _end(capsule: int) -> None:
    """End a capsule. If nobody has taken its tensor, let go of the array."""
    for name in (_PLAIN, _VERSIONED):
        if _is_valid_still(capsule, name):
            _exports.pop(_pointer_still(capsule, name), None)


_DELETER = ctypes.CFUNCTYPE(None, c_void_p)(_delete)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, c_void_p)(_end)


def exported(
    owner: Any, address: int, device: int, shape: tuple[int, ...], dtype: str, max_version: tuple[int, int] | None
) -> Any:
    """Return a capsule of a row-major array, which keeps `owner` alive until the importing library lets go of it.

    Args:
        owner: the object that owns the memory.
        address: the memory.
        device: the number of the CUDA device.
        shape: the array's shape.
        dtype: NumPy's name of the type.
        max_version: the newest version of DLPack that the importing library knows; None is before version 1.
    """
    kind = numpy_dtype(dtype)
    code = _BFLOAT if dtype == "bfloat16" else _CODES[kind.kind]
    lengths = (c_int64 * len(shape))(*shape)
    steps = (c_int64 * len(shape))()
    step = 1
    for dim in reversed(range(len(shape))):
        steps[dim] = step
        step *= shape[dim]
    tensor = _Tensor(address, CUDA, device, len(shape), code, 8 * kind.itemsize, 1, lengths, steps, 0)
    deleter = ctypes.cast(_DELETER, c_void_p)
    made: _Managed | _ManagedVersioned
    if max_version is not None and max_version[0] >= _VERSION[0]:
        name, made = _VERSIONED, _ManagedVersioned(*_VERSION, None, deleter, 0, tensor)
    else:
        name, made = _PLAIN, _Managed(tensor, None, deleter)
    _exports[ctypes.addressof(made)] = (made, lengths, steps, owner)
    return _new(ctypes.addressof(made), name, ctypes.cast(_DESTRUCTOR, c_void_p))


def imported(array: Any, stream: int) -> Imported:
    """Return the memory of an array in CUDA memory. Its library makes `stream` wait until the contents are complete.

    Raises:
        ArgumentError: the library does not give the memory, or its type is none of multiring's.
    """
    kind = type(array).__qualname__
    try:
        try:
            capsule = array.__dlpack__(stream=stream, max_version=_VERSION)
        except TypeError:  # a library from before version 1
            capsule = array.__dlpack__(stream=stream)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{kind} does not expose its memory: {error}") from None
    if _is_valid(capsule, _VERSIONED):
        versioned = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
        if versioned.major != _VERSION[0]:
            raise ArgumentError(f"{kind} has DLPack {versioned.major}.{versioned.minor}; want version 1")
        tensor, is_read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    else:
        tensor, is_read_only = _Managed.from_address(_pointer(capsule, _PLAIN)).tensor, False
    shape = tuple(tensor.shape[: tensor.dims])
    strides = tuple(tensor.strides[: tensor.dims]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return Imported(address, tensor.device, shape, strides, _name_of(tensor, kind), is_read_only, capsule)


def _name_of(tensor: _Tensor, kind: str) -> str:
    letters = {code: letter for letter, code in _CODES.items()}
    if tensor.lanes != 1 or tensor.code not in {*letters, _BFLOAT}:
        raise ArgumentError(f"{kind} has elements of DLPack's type {tensor.code}, {tensor.lanes} lanes; want numbers")
    if tensor.code == _BFLOAT:
        return "bfloat16"
    letter = letters[tensor.code]
    return str(numpy_dtype("bool" if letter == "b" else f"{letter}{tensor.bits // 8}").name)
