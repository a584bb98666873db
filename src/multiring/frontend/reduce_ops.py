"""The reduction operations by Horovod's numbers, and by multiring's names."""

import warnings
from typing import NamedTuple

from multiring.errors import ArgumentError

Average = 0
"""The mean of all ranks' numbers."""
Sum = 1
"""Their sum."""
Adasum = 2
"""Their sum where they are orthogonal, their mean where they are alike, and in between otherwise (Adasum)."""
Min = 3
"""The least of them."""
Max = 4
"""The greatest of them."""
Product = 5
"""Their product."""
LINEAR = (Average, Sum)

_NAMES = ("average", "sum", "adasum", "min", "max", "product")
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


def name_of(op: int) -> str:
    """Return what a Group calls `op`; Adasum has no such name, and is "adasum"."""
    return _NAMES[op]


def chosen_op(op: int | str | None, average: bool | None = None) -> int:
    """Return the operation that was asked for, by its number; by default Average.

    Args:
        op: a number, or a name such as "sum".
        average: what Horovod had before it had `op`: True for Average, False for Sum.

    Raises:
        ArgumentError: both are given, or there is no such operation.
    """
    if average is not None:
        if op is not None:
            raise ArgumentError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    if op is None:
        return Average
    number = _NUMBERS.get(op) if isinstance(op, str) else op
    if number.__class__ is int and 0 <= number < len(_NAMES):
        return number
    raise ArgumentError(f"op={op!r}: want one of {', '.join(f'{name.capitalize()}' for name in _NAMES)}, or its name")


class Combination(NamedTuple):
    """How tensors are combined: scaled, reduced, and scaled again."""

    op: int
    prescale: float
    postscale: float
    wire: str | None  # how float32 travels between hosts


def combination(
    op: int | str | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    wire: str | None = None,
) -> Combination:
    """Return the combination that was asked for; see `chosen_op` for the errors."""
    chosen = chosen_op(op, average)
    try:
        return Combination(chosen, float(prescale), float(postscale), wire)
    except (TypeError, ValueError):
        raise ArgumentError(f"factors {prescale!r} and {postscale!r}: want numbers") from None
