"""Choose a type for a batch's array that holds the values of all samples exactly.

The first sample determines the type. A sample of another type widens it by NumPy's promotion: int8 and int64 give
int64, float16 and float64 give float64. Integers of 64 bits together with floats give float64, which cannot hold all
these integers. In this case each value is compared after the conversion, and a changed value is an error.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_NUMBERS = "biufc"
_ALIKE = "SUmM"  # kinds that only widen to the same kind: bytes, text, time spans and times


def widened(first: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return a type that holds the values of both types, or None if there is none."""
    if first == other:
        return first
    if first.kind not in _NUMBERS + _ALIKE or other.kind not in _NUMBERS + _ALIKE:
        return None
    if first.kind != other.kind and not {first.kind, other.kind} <= set(_NUMBERS):
        return None
    try:
        return np.promote_types(first, other)
    except TypeError:  # for instance time spans in months and in days
        return None


def put_exactly(out: Array, value: Array) -> bool:
    """Write `value` into `out`, and return whether no value has changed.

    `out` has a type that `widened` returned.
    """
    with np.errstate(all="ignore"):
        np.copyto(out, value, casting="unsafe")
        if value.dtype == out.dtype or not (
            value.dtype.kind in "iu" and value.dtype.itemsize >= 8 and out.dtype.kind in "fc"
        ):
            return True
        back = out.real.astype(value.dtype)
        # A value that was rounded up to 2**63 or 2**64 is out of range, and the cast back is undefined for it.
        inside = out.real < float(np.iinfo(value.dtype).max)
        return bool(np.all((back == value) & inside))
