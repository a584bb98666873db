"""Checks that an argument is a number within bounds, or one of several choices."""

from typing import Any

import numpy as np

from multiring.errors import ArgumentError


def require_number(what: str, value: Any, least: float = 0.0, below: float = np.inf) -> None:
    """Raise ArgumentError unless `value` is a number of at least `least` and below `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < below:
        end = "" if below == np.inf else f" and below {below:g}"
        raise ArgumentError(f"{what}={value!r}: want a number of {least:g} or more{end}")


def require_choice(what: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`."""
    if value not in choices:
        raise ArgumentError(f"{what}={value!r}: want {' or '.join(map(repr, choices))}")
