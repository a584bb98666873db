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

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError
from multiring.schedule.kinds import Wire

Floats = NDArray[np.float32]
Raw = NDArray[np.uint8]

BLOCK = 256  # elements that share a scale
_SCALE_BYTES = 4
_LOST_BITS = np.uint32(0x7F)  # cleared in a scale, so that 127 s fits into a float32
_LEAST = np.float32(2.0**-119)


def wire_of(name: object) -> Wire:
    """Return the wire type called `name`; None means Wire.NONE.

    Raises:
        ArgumentError: there is no such type.
    """
    if name is None:
        return Wire.NONE
    known = {wire.name.lower(): wire for wire in Wire if wire is not Wire.NONE}
    wire = known.get(name) if isinstance(name, str) else None
    if wire is None:
        raise ArgumentError(f"wire={name!r}: want one of {', '.join(known)}, or None")
    return wire


def encoded_bytes(wire: Wire, elements: int) -> int:
    """Return the size in bytes of `elements` encoded float32, starting at the start of a block."""
    if wire is Wire.INT8:
        return elements + _SCALE_BYTES * -(-elements // BLOCK)
    return elements * (4 if wire is Wire.NONE else 2)


def encode(wire: Wire, array: Floats) -> Raw:
    """Return `array` encoded: shape (encoded_bytes(wire, array.size),)."""
    with np.errstate(over="ignore"):  # values too large become infinity
        raw: Raw = _CODECS[wire][0](np.ascontiguousarray(array, np.float32).ravel())
    return raw


def decode(wire: Wire, raw: Raw, elements: int) -> Floats:
    """Return `elements` decoded float32: shape (elements,)."""
    with np.errstate(invalid="ignore"):
        array: Floats = _CODECS[wire][1](raw, elements)
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
    blocks = -(-array.size // BLOCK)
    padded = np.zeros((blocks, BLOCK), np.float32)
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
    blocks = -(-elements // BLOCK)
    rows = np.zeros((blocks, _SCALE_BYTES + BLOCK), np.uint8)
    rows.ravel()[: raw.size] = raw
    scale = np.ascontiguousarray(rows[:, :_SCALE_BYTES]).view(np.float32)
    values: Floats = rows[:, _SCALE_BYTES:].view(np.int8) * scale
    return values.ravel()[:elements]


_CODECS: Mapping[Wire, tuple[Callable[[Floats], Raw], Callable[[Raw, int], Floats]]] = MappingProxyType(
    {
        Wire.FP16: (_encode_fp16, _decode_fp16),
        Wire.BF16: (_encode_bf16, _decode_bf16),
        Wire.INT8: (_encode_int8, _decode_int8),
    }
)
