"""Average and scale integers exactly, including integers that float64 cannot represent.

Averages, and products with a factor, are truncated towards zero, as in Horovod.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

_EXACT_BITS = 53  # float64 holds every integer up to this many bits
_HALF_BITS = 32
_MASK = (1 << _HALF_BITS) - 1


def halves(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the upper and lower 32 bits of integers, in an additional last dimension of 2.

    Sums of these halves over the ranks cannot overflow.
    """
    wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64, copy=False)
    found = np.empty((*array.shape, 2), np.int64)
    found[..., 0] = (wide >> wide.dtype.type(_HALF_BITS)).astype(np.int64)
    found[..., 1] = (wide & wide.dtype.type(_MASK)).astype(np.int64)
    return found


def average_of_halves(sums: NDArray[np.int64], ranks: int, factor: float, dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Return the average, times `factor`, of integers whose `halves` were summed over the ranks.

    Args:
        sums: the sums of the upper and of the lower halves, in the last dimension, of 2.
        ranks: the number of ranks, which divides the sum.
        factor: multiplies the quotient before it is truncated.
        dtype: the result's type.

    Raises:
        ArgumentError: the factor is infinite or NaN.
    """
    _require_finite(factor)
    flat = sums.reshape(-1, 2)  # use arrays: NumPy warns if scalars wrap, and these numbers must wrap
    upper = flat[:, 0] + (flat[:, 1] >> _HALF_BITS)
    lower = flat[:, 1] & _MASK
    if factor != 1.0:
        product = _scaled_sums(upper, lower, Fraction(factor) / ranks, factor / ranks)
        return product.astype(dtype).reshape(sums.shape[:-1])
    quotient, rest = np.divmod(upper, ranks)
    more, rest = np.divmod((rest << _HALF_BITS) + lower, ranks)
    # For unsigned integers the upper half of the quotient may reach the sign bit, so bits above 64 must be dropped.
    floor = (quotient.astype(np.uint64) << np.uint64(_HALF_BITS)) + more.astype(np.uint64)
    truncated: NDArray[Any] = floor + ((upper < 0) & (rest != 0)).astype(np.uint64)
    return truncated.astype(dtype).reshape(sums.shape[:-1])


def scaled_integers(array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Return integers times `factor`, truncated towards zero.

    Results beyond the type's limits wrap.

    Raises:
        ArgumentError: the factor is infinite or NaN.
    """
    _require_finite(factor)
    if array.dtype.itemsize * 8 <= _EXACT_BITS:
        found = _wrapped(np.trunc(array.reshape(-1).astype(np.float64) * factor), array.dtype)
    else:
        split = halves(array.reshape(-1))
        found = _scaled_sums(split[:, 0], split[:, 1], Fraction(factor), factor).astype(array.dtype)
    return found.reshape(array.shape)


def _require_finite(factor: float) -> None:
    if not math.isfinite(factor):
        raise ArgumentError(f"factor {factor} for integers: want a finite factor, or floating-point numbers")


def _scaled_sums(upper: NDArray[np.int64], lower: NDArray[np.int64], exact: Fraction, factor: float) -> NDArray[Any]:
    """Return `upper * 2^32 + lower` times a factor, as integers of 64 bits."""
    limit = 1 << (_EXACT_BITS - _HALF_BITS)
    is_small = (upper >= -limit) & (upper < limit)
    values = (upper << _HALF_BITS) + lower
    found = _wrapped(np.trunc(np.where(is_small, values, 0).astype(np.float64) * factor), np.dtype(np.int64))
    for at in np.flatnonzero(~is_small):
        product = ((int(upper[at]) << _HALF_BITS) + int(lower[at])) * exact
        found[at] = _signed(int(product))
    return found


def _wrapped(whole: NDArray[np.float64], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Return whole numbers, shape (n,), as integers that wrap. In C, larger numbers have no defined conversion."""
    is_small = np.abs(whole) < 2.0**63
    found = np.where(is_small, whole, 0.0).astype(np.int64)
    for at in np.flatnonzero(~is_small & np.isfinite(whole)):
        found[at] = _signed(int(whole[at]))
    return found.astype(dtype)


def _signed(value: int) -> int:
    """Return an integer wrapped to 64 bits."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
