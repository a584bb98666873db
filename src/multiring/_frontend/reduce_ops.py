"""The reduction operations by Horovod's numbers, and by multiring's names."""

import warnings
from typing import NamedTuple

from multiring._arguments import shown, whole
from multiring.errors import ArgumentError

Average = 0
"""The mean over all ranks."""
Sum = 1
"""The sum over all ranks."""
Adasum = 2
"""Adasum: the sum of orthogonal vectors, the mean of parallel vectors, and a value in between for others."""
Min = 3
"""The minimum over all ranks."""
Max = 4
"""The maximum over all ranks."""
Product = 5
"""The product over all ranks."""
LINEAR = (Average, Sum)

_NAMES = ("average", "sum", "adasum", "min", "max", "product")
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


def name_of(op: int) -> str:
    """Return the name of `op`. A Group uses the same names, but has no "adasum"."""
    return _NAMES[op]


def chosen_op(op: int | str | None, average: bool | None = None) -> int:
    """Return the number of the chosen operation; Average by default.

    Args:
        op: a number, or a name such as "sum".
        average: Horovod's deprecated parameter: True for Average, False for Sum.

    Raises:
        ArgumentError: both arguments are given, or the operation is unknown.
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
    if number.__class__ is not int:
        number = whole(number)
    if number is not None and 0 <= number < len(_NAMES):
        return number
    raise ArgumentError(f"op={op!r}: want one of {', '.join(f'{name.capitalize()}' for name in _NAMES)}, or its name")


class Combination(NamedTuple):
    """The way to combine tensors: scale, reduce, and scale again."""

    op: int
    prescale: float
    postscale: float
    wire: str | None  # the type in which float32 travels between hosts


def combination(
    op: int | str | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    wire: str | None = None,
) -> Combination:
    """Return the combination for these arguments; see `chosen_op` for `op`, `average` and the errors."""
    chosen = chosen_op(op, average)
    try:
        # float() would take texts and truth values.
        if not isinstance(prescale, str | bytes | bool) and not isinstance(postscale, str | bytes | bool):
            return Combination(chosen, float(prescale), float(postscale), wire)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ArgumentError(f"factors {shown(prescale)} and {shown(postscale)}: want numbers")
