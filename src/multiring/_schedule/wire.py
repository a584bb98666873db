"""Wire types: lossy encodings of float32 elements for messages.

Tests compare the native codecs with this module.

FP16 and BF16 are the 16-bit floats, rounded to nearest, ties to even. Values beyond the largest finite number, 65504
for float16, become infinity.

INT8 encodes blocks of 256 elements, counted from the start of the user's buffer (`layout.grain_of` cuts there). A
block is a float32 scale s and one signed byte q per element; the last block may be shorter. m = max |x| of a block:

- s is m / 127 without the lowest seven bits of its significand. q is x * (1 / s) rounded to the nearest integer, ties
  to even. The decoded value is q * s: off by at most s / 2, 0.4 % of m. q * s is exact, and encoding it again
  gives the same bytes, so a second encoding loses nothing.
- If m is below 2^-119, s is 0 and all decoded values are zero. So no scale and no decoded value is ever subnormal.
- If m is infinite or NaN, s and all decoded values are NaN. So an average never hides an overflow.

All wire types decode a NaN as the positive quiet NaN.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.kinds import Wire
from multiring.errors import ArgumentError

Floats = NDArray[np.float32]
Raw = NDArray[np.uint8]

_BLOCK = 256  # elements that share a scale
_SCALE_BYTES = 4
_LOST_BITS = np.uint32(0x7F)  # cleared in a scale, so that 127 s fits into a float32
_LEAST = np.float32(2.0**-119)


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How a lossy wire type encodes float32 elements."""

    encode: Callable[[Floats], Raw]
    decode: Callable[[Raw, int], Floats]  # the second argument is the number of elements
    element_bytes: int
    error: float  # the largest change of an element by one encoding, relative to the largest element of its block
    block: int = 1  # elements that share a scale
    scale_bytes: int = 0  # for each block, the last block of a message included

    @property
    def is_scaled(self) -> bool:
        """Whether elements share a scale, so that small elements of a block lose more than large elements."""
        return self.block > 1


def wire_of(name: object) -> Wire:
    """Return the wire type called `name`; None means Wire.NONE.

    Raises:
        ArgumentError: there is no such type.
    """
    if name is None:
        return Wire.NONE
    if not isinstance(name, str) or name not in WIRES:
        raise ArgumentError(f"wire={name!r}: want one of {', '.join(WIRES)}, or None")
    return Wire[name.upper()]


def encoded_bytes(wire: Wire, elements: int) -> int:
    """Return the size in bytes of `elements` encoded float32, starting at the start of a block."""
    if wire is Wire.NONE:
        return 4 * elements
    form = FORMATS[wire]
    return form.element_bytes * elements + form.scale_bytes * -(-elements // form.block)


def encode(wire: Wire, array: Floats) -> Raw:
    """Return `array` encoded: shape (encoded_bytes(wire, array.size),)."""
    with np.errstate(over="ignore"):  # values too large become infinity
        raw: Raw = FORMATS[wire].encode(np.ascontiguousarray(array, np.float32).ravel())
    return raw


def decode(wire: Wire, raw: Raw, elements: int) -> Floats:
    """Return `elements` decoded float32: shape (elements,)."""
    with np.errstate(invalid="ignore"):
        array: Floats = FORMATS[wire].decode(raw, elements)
    array[np.isnan(array)] = np.nan  # drop the sign and payload of NaNs
    return array


def decoded(wire: Wire, array: Floats) -> Floats:
    """Return `array` after encoding and decoding."""
    return decode(wire, encode(wire, array), array.size).reshape(array.shape)


def _encode_bf16(array: Floats) -> Raw:
    bits = array.view(np.uint32)
    # Round to nearest even at bit 16. A carry out of the significand correctly increments the exponent, up to infinity.
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    raw: Raw = np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16).view(np.uint8)
    return raw


def _decode_bf16(raw: Raw, _: int) -> Floats:
    array: Floats = (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array


def _encode_fp16(array: Floats) -> Raw:
    return np.where(np.isnan(array), np.float32(np.nan), array).astype(np.float16).view(np.uint8)


def _decode_fp16(raw: Raw, _: int) -> Floats:
    return raw.view(np.float16).astype(np.float32)


def _encode_int8(array: Floats) -> Raw:
    blocks = -(-array.size // _BLOCK)
    padded = np.zeros((blocks, _BLOCK), np.float32)
    padded.ravel()[: array.size] = array
    largest = np.abs(padded).max(axis=1, initial=0)
    scale = ((largest / np.float32(127)).view(np.uint32) & ~_LOST_BITS).view(np.float32)
    scale[largest < _LEAST] = 0
    scale[~np.isfinite(largest)] = np.nan
    usable = np.isfinite(scale) & (scale > 0)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=usable)
    values = np.rint(np.where(usable[:, np.newaxis], padded, np.float32(0)) * inverse[:, np.newaxis]).astype(np.int8)
    rows = np.concatenate([scale[:, np.newaxis].view(np.uint8), values.view(np.uint8)], axis=1)
    return rows.ravel()[: encoded_bytes(Wire.INT8, array.size)]


def _decode_int8(raw: Raw, elements: int) -> Floats:
    blocks = -(-elements // _BLOCK)
    rows = np.zeros((blocks, _SCALE_BYTES + _BLOCK), np.uint8)
    rows.ravel()[: raw.size] = raw
    scale = np.ascontiguousarray(rows[:, :_SCALE_BYTES]).view(np.float32)
    values: Floats = rows[:, _SCALE_BYTES:].view(np.int8) * scale
    return values.ravel()[:elements]


FORMATS: Mapping[Wire, WireFormat] = MappingProxyType(
    {
        Wire.FP16: WireFormat(_encode_fp16, _decode_fp16, element_bytes=2, error=2.0**-11),
        Wire.BF16: WireFormat(_encode_bf16, _decode_bf16, element_bytes=2, error=2.0**-8),
        Wire.INT8: WireFormat(
            _encode_int8, _decode_int8, element_bytes=1, error=1 / 254, block=_BLOCK, scale_bytes=_SCALE_BYTES
        ),
    }
)
"""The lossy wire types: all of `Wire` but NONE."""
WIRES = tuple(wire.name.lower() for wire in FORMATS)
"""The names of the lossy wire types."""
COMMON_BLOCK = math.lcm(*(form.block for form in FORMATS.values()))
"""A number of elements that is a multiple of every wire type's block."""
