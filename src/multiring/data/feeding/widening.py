"""The type of a batch's array: one that holds the values of all its samples as they are.

The first sample says a type. A sample of another one widens it, as NumPy promotes the two: int8 and int64 give int64,
float16 and float64 give float64. Whole numbers of 64 bits beside floats give float64, which does not hold all of them:
each value is compared then, and one that would change is an error.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_NUMBERS = "biufc"
_ALIKE = "SUmM"  # kinds that widen among themselves: text, and spans and points of time


def widened(first: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the type in which values of two types are kept together; None where there is none."""
    if first == other:
        return first
    if first.kind not in _NUMBERS + _ALIKE or other.kind not in _NUMBERS + _ALIKE:
        return None
    if first.kind != other.kind and not {first.kind, other.kind} <= set(_NUMBERS):
        return None
    try:
        return np.promote_types(first, other)
    except TypeError:  # as spans of time whose units do not go into each other
        return None


def put_exactly(out: Array, value: Array) -> bool:
    """Write `value` into `out`, of a type that `widened` gave; return whether every value is what it was."""
    with np.errstate(all="ignore"):
        np.copyto(out, value, casting="unsafe")
        if value.dtype == out.dtype or not (
            value.dtype.kind in "iu" and value.dtype.itemsize >= 8 and out.dtype.kind in "fc"
        ):
            return True
        back = out.real.astype(value.dtype)
        # Of floats at the ends of the range a cast says anything: those that round up to 2**63 or 2**64 are beyond it.
        inside = out.real < float(np.iinfo(value.dtype).max)
        return bool(np.all((back == value) & inside))
