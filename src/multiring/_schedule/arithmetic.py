"""Define sum, average, min, max and product for each type: the reference for the tests of the native kernels.

Operands are combined left to right. float32 and float64 are combined in their own type. The 16-bit floats (float16,
bfloat16) are combined in float32 and rounded once. Integers wrap. An average divides before it is rounded, once. A NaN
result is the type's positive quiet NaN, because processors keep the payload of different operands. If the operands
of min or max are equal (+0 and -0), the result is the later operand. docs/algorithms.md has the table.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.kinds import Accumulation
from multiring.errors import ArgumentError, ScheduleError

Array = NDArray[Any]


def _least(left: Array, right: Array) -> Array:
    return np.where((left < right) | _is_nan(left), left, right)


def _greatest(left: Array, right: Array) -> Array:
    return np.where((left > right) | _is_nan(left), left, right)


def _is_nan(array: Array) -> NDArray[np.bool_]:
    nans: NDArray[np.bool_] = array != array  # noqa: PLR0124 isnan refuses integers
    return nans


_COMBINE: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {"sum": np.add, "average": np.add, "min": _least, "max": _greatest, "product": np.multiply}
)
_COMBINE_BOOLS: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {"sum": np.logical_or, "min": np.logical_and, "max": np.logical_or, "product": np.logical_and}
)

OPS = tuple(_COMBINE)


def accumulation_of(dtype: np.dtype[Any], op: str) -> Accumulation:
    """Return the accumulation that `op` over arrays of `dtype` needs.

    Raises:
        ArgumentError: the operation is unknown, or it is not defined for this type.
    """
    if op not in OPS:
        raise ArgumentError(f"op={op!r}: want one of {', '.join(OPS)}")
    if not _is_float16(dtype) and dtype.kind not in "fiub":
        raise ArgumentError(f"dtype={dtype}: want a float, an integer or bool")
    if dtype.kind == "b" and op == "average":
        raise ArgumentError("the average of bools is not a bool: use op='sum' (any) or op='product' (all)")
    if _is_float16(dtype) and op in {"sum", "average", "product"}:
        return Accumulation.WIDE
    if dtype.kind in "iu" and op == "average":
        return Accumulation.ONCE
    return Accumulation.SAME


def combine(operands: Sequence[Array], op: str, accumulation: Accumulation, ranks: int, *, last: bool) -> Array:
    """Return the array that one REDUCE writes: its `operands`, combined left to right.

    Args:
        operands: arrays of one shape and type.
        op: one of OPS.
        accumulation: the schedule's accumulation.
        ranks: the number of contributions; a complete average divides by it.
        last: whether the operands now hold the contributions of all ranks.

    Raises:
        ArgumentError: `op` is not defined for the type.
        ScheduleError: `op` on this type needs a wider accumulation than the schedule has.
    """
    dtype = operands[0].dtype
    needed = accumulation_of(dtype, op)
    if needed > accumulation:
        raise ScheduleError(
            f"{op} of {dtype} needs {needed.name.lower()} accumulation, but the schedule has "
            f"{accumulation.name.lower()}"
        )
    wide = dtype
    if _is_float16(dtype):
        wide = np.dtype(np.float32)
    elif dtype.kind in "iu" and op == "average":
        wide = np.dtype(object)  # Python's integers, which never wrap
    table = _COMBINE_BOOLS if dtype.kind == "b" else _COMBINE
    # Overflow to infinity and wrapped integers are valid results.
    with np.errstate(all="ignore"):
        total = reduce(table[op], [operand.astype(wide) for operand in operands])
        if op == "average" and last:
            total = _truncated(total, ranks) if wide.kind == "O" else total / wide.type(ranks)
        result: Array = total.astype(dtype)
    nans = _is_nan(result)
    if nans.any():
        result[nans] = np.nan
    return result


def _truncated(total: Array, ranks: int) -> Array:
    found: Array = np.where(total < 0, -(-total // ranks), total // ranks)
    return found


def _is_float16(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes registers bfloat16 as a separate type: its dtype.kind is not "f".
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")
