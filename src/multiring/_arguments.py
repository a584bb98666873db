"""Checks of arguments: numbers within bounds, truth values, choices, paths and functions.

A truth value is no number here, and neither is text: `int` and `float` would take both. Scalars of NumPy are numbers.
A check returns its value as Python's own type, because NumPy's scalars are no JSON and wrap at their width.
"""

import math
import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from multiring.errors import ArgumentError

_SHOWN = 200  # characters that a message shows of a value
Value = TypeVar("Value")


def whole(value: Any) -> int | None:
    """Return a whole number of Python or NumPy as an int; None for anything else."""
    if _is_truth(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_whole(what: str, value: Any, least: int = 0, most: int | None = None, *, wanted: str = "") -> int:
    """Return a whole number of at least `least` and at most `most`.

    Args:
        what: the name of the argument, for the message.
        value: the argument.
        least: the lowest number allowed.
        most: the highest one; None for no limit.
        wanted: what the message says is wanted; by default the bounds.

    Raises:
        ArgumentError: `value` is not such a number.
    """
    found = whole(value)
    if found is None or found < least or (most is not None and found > most):
        bounds = f"{least} to {most}" if most is not None else f"{least} or more"
        raise ArgumentError(f"{what}={shown(value)}: want {wanted or f'a whole number, {bounds}'}")
    return found


def is_number(value: Any) -> bool:
    """Return whether `value` is a real number of Python or NumPy; NaN and infinity are."""
    return isinstance(value, Real) and not _is_truth(value)


def require_number(
    what: str,
    value: Any,
    least: float = 0.0,
    below: float = math.inf,
    *,
    most: float | None = None,
    above: bool = False,
) -> float:
    """Return a finite number of at least `least` and below `below` as a float.

    Args:
        what: the name of the argument, for the message.
        value: the argument.
        least: the lowest number allowed.
        below: the first number that is too high.
        most: the highest number allowed, in place of `below`.
        above: whether the number has to be above `least`.

    Raises:
        ArgumentError: `value` is not such a number. NaN is not, and neither is infinity.
    """
    is_right = is_number(value) and least <= value < below
    is_right = is_right and not (above and value == least) and not (most is not None and value > most)
    found = _as_float(value) if is_right else None
    if found is None:
        start = f"above {least:g}" if above else "that is finite" if least == -math.inf else f"of {least:g} or more"
        end = f" and at most {most:g}" if most is not None else "" if below == math.inf else f" and below {below:g}"
        raise ArgumentError(f"{what}={shown(value)}: want a number {start}{end}")
    return found


def require_numbers(what: str, values: Any, count: int, **bounds: Any) -> tuple[float, ...]:
    """Return `count` numbers as floats.

    Args:
        what: the name of the argument, for the message.
        values: a list or a tuple.
        count: how many numbers are wanted.
        bounds: of each number, as `require_number` takes them.

    Raises:
        ArgumentError: `values` is not so many such numbers.
    """
    if not isinstance(values, list | tuple) or len(values) != count:
        raise ArgumentError(f"{what}={shown(values)}: want {count} numbers")
    return tuple(require_number(what, each, **bounds) for each in values)


def require_seed(what: str, value: Any) -> int:
    """Return a seed, any whole number, as an int.

    A seed of another type would give other random numbers than the int that it looks like: they depend on its text.

    Raises:
        ArgumentError: `value` is not a whole number.
    """
    found = whole(value)
    if found is None:
        raise ArgumentError(f"{what}={shown(value)}: want a whole number, the same on every rank")
    return found


def require_flag(what: str, value: Any) -> bool:
    """Return a truth value of Python or NumPy as a bool; 0 and 1 are truth values, too.

    Raises:
        ArgumentError: `value` is something else, such as the text "false", which Python takes for true.
    """
    if _is_truth(value) or whole(value) in {0, 1}:
        return bool(value)
    raise ArgumentError(f"{what}={shown(value)}: want True or False")


def require_choice(what: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{what}={shown(value)}: want {' or '.join(map(repr, choices))}")


def require_text(what: str, value: Any) -> str:
    """Return a text, which may be empty.

    Raises:
        ArgumentError: `value` is no text.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{what}={shown(value)}: want a text")
    return value


def require_path(what: str, value: Any) -> Path:
    """Return a path, given as text or as an object of os.PathLike.

    The empty text would mean the current folder.

    Raises:
        ArgumentError: `value` is no path, or is empty, or has a null character.
    """
    try:
        text = os.fspath(value)
    except TypeError:
        text = b""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{what}={shown(value)}: want a path")
    return Path(text)


def require_function(what: str, value: Value, wanted: str = "a function") -> Value:
    """Return `value` if it can be called.

    Raises:
        ArgumentError: it cannot be called.
    """
    if not callable(value):
        raise ArgumentError(f"{what}={shown(value)}: want {wanted}")
    return value


def is_of(value: object, *kinds: type) -> bool:
    """Return whether `value` is of one of the kinds, whatever type a caller has declared it to be of."""
    return isinstance(value, kinds)


def shown(value: Any) -> str:
    """Return `value` as a message shows it, on one line and cut off if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python shows no integer of thousands of digits
        return f"(a {type(value).__name__} that is too long to show)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"


def _as_float(value: Any) -> float | None:
    try:
        found = float(value)
    except OverflowError:  # an integer beyond float64
        return None
    return found if math.isfinite(found) else None
