"""Draw random values, types and records for the data evidence, and compare values."""

import io
import struct
import tarfile
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
from benchmarks.evidence.support.cases import Random

INTEGERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
FLOATS = ("f2", "f4", "f8")
NUMBERS = (*INTEGERS, *FLOATS, "?")
WORDS = ("", "a", "zero\0end\0", "caf\u00e9", "\u4e2d\u6587", "\U0001f642", "line\nbreak", "\0", " x ")


def chosen(random: Random, values: Any) -> Any:
    """Return a random element of `values`, unconverted."""
    return values[int(random.integers(len(values)))]


def array_of(random: Random, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a random array whose integers span the whole range of their type."""
    # For the empty shape, NumPy draws scalars, which lose the byte order.
    return np.asarray(_drawn(random, np.dtype(dtype), shape)).astype(dtype).reshape(shape)


def _drawn(random: Random, kind: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    if kind.names is not None:
        found = np.empty(shape, kind)
        for name in kind.names:
            found[name] = array_of(random, kind[name], shape)
        return found
    if kind.kind == "b":
        return random.integers(2, size=shape).astype(kind)
    if kind.kind in "iu":
        ends = np.iinfo(kind)
        spread = random.integers(ends.min, ends.max, size=shape, dtype=kind.newbyteorder("="), endpoint=True)
        small = np.minimum(spread.astype(np.uint64) & np.uint64(63), np.uint64(63)).astype(kind)
        return np.where(random.random(shape) < 0.5, spread, small).astype(kind)
    if kind.kind == "c":
        part = np.dtype(f"f{kind.itemsize // 2}")
        return (array_of(random, part, shape) + 1j * array_of(random, part, shape)).astype(kind)
    with np.errstate(over="ignore"):
        return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4)).astype(kind)


def shape_of(random: Random, most: int = 3, longest: int = 4) -> tuple[int, ...]:
    """Return a random shape with fewer than `most` axes."""
    return tuple(random.integers(1, longest + 1, size=int(random.integers(most))).tolist())


def text_of(random: Random) -> str:
    """Return a random text, often with zeros and characters beyond ASCII."""
    return "".join(chosen(random, WORDS) for _ in range(int(random.integers(3))))


def bytes_of(random: Random, most: int = 9) -> bytes:
    """Return random bytes, often with zeros at their end."""
    data = random.integers(256, size=int(random.integers(most)), dtype=np.uint8).tobytes()
    return data + b"\0" * int(random.integers(3))


def npy_of(array: Any) -> bytes:
    """Return the content of the .npy file of an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a regular file to a tar archive."""
    told_ = tarfile.TarInfo(name)
    told_.size = len(data)
    tar.addfile(told_, io.BytesIO(data))


def framed(data: bytes) -> bytes:
    """Return a TFRecord record by TensorFlow's specification.

    It consists of the length, the data and their check sums.
    """

    def crc(of: bytes) -> bytes:
        value = google_crc32c.value(of)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    head = struct.pack("<Q", len(data))
    return head + crc(head) + data + crc(data)


def same(found: Any, wanted: Any, *, types: bool = True) -> bool:
    """Return whether two values, and by default their types, are equal.

    NaN equals NaN.
    """
    if types and type(found) is not type(wanted):
        return False
    if hasattr(wanted, "new_tensor"):
        return same_tensors(found, wanted)
    is_array = any(isinstance(each, np.ndarray | np.generic) for each in (found, wanted))
    if is_array and not isinstance(wanted, str | bytes):
        first, second = np.asarray(found), np.asarray(wanted)
        has_type = first.dtype == second.dtype or not types
        return has_type and first.shape == second.shape and same_numbers(first, second)
    return _same_parts(found, wanted, types=types)


def _same_parts(found: Any, wanted: Any, *, types: bool) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            same(found[key], each, types=types) for key, each in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(
            same(one, other, types=types) for one, other in zip(found, wanted, strict=True)
        )
    return bool(found == wanted or (found != found and wanted != wanted))  # noqa: PLR0124 -- not a number


def same_numbers(first: Any, second: Any) -> bool:
    """Return whether two arrays have exactly equal values.

    The values are compared as Python objects, so the arrays' types may differ.
    """
    ones, others = first.reshape(-1).tolist(), second.reshape(-1).tolist()
    return all(
        one == other or (one != one and other != other)  # noqa: PLR0124 -- as above
        for one, other in zip(ones, others, strict=True)
    )


def same_tensors(found: Any, wanted: Any) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    import torch  # noqa: PLC0415 -- few families need it

    if type(found) is not type(wanted) or found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if not wanted.numel():
        return True
    one, other = (each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (found, wanted))
    return bool(torch.equal(one, other))


def told(value: Any) -> str:
    """Return a short text with a value and its type."""
    kind = f"{value.dtype} " if hasattr(value, "dtype") else ""
    return f"{type(value).__name__} {kind}{value!r}"[:160]


Draw = Callable[[Random], Any]
