"""Options that take a number. Each declares its bounds, and a command begins only with numbers within these."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

from multiring.errors import ArgumentError

_SHOWN = 60  # characters that a message shows of a text that is no number
MOST = 2**31 - 1  # of counts that have no other bound: what counts for native code, too
MOST_RANKS = 1 << 16
MOST_BYTES = 2**63 - 1  # and of samples


@dataclass(frozen=True, slots=True)
class NumberOption:
    """The type of an option that takes a number, for argparse.

    Attributes:
        kind: int or float.
        least: the smallest number.
        most: the largest number.
        is_open: whether the number must be above `least`.
        unit: what the number counts, in the message.
    """

    kind: type[int] | type[float]
    least: float
    most: float
    is_open: bool = False
    unit: str = ""

    def __call__(self, text: str) -> float:
        """Return the number in `text`, which may be out of the bounds; see `require_numbers`."""
        try:
            return self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r}: want {self.wanted}") from None

    @property
    def wanted(self) -> str:
        """The bounds in words."""
        most = f"{self.most}" if self.kind is int else f"{self.most:.15g}"
        what = "a whole number" if self.kind is int else "a number"
        what += f" of {self.unit}" if self.unit else ""
        return f"{what} above {self.least:g}, at most {most}" if self.is_open else f"{what}, {self.least} to {most}"

    def takes(self, value: float) -> bool:
        """Return whether `value` is within the bounds. NaN is not."""
        return (self.least < value if self.is_open else self.least <= value) and value <= self.most


def whole(least: int, most: int = MOST) -> NumberOption:
    """Return the type of an option that takes a whole number."""
    return NumberOption(int, least, most)


def number(least: float, most: float = 1e18, *, above: bool = False) -> NumberOption:
    """Return the type of an option that takes a finite number; with `above`, a number above `least`."""
    return NumberOption(float, least, most, is_open=above)


COUNT = whole(1)
RANKS = whole(1, MOST_RANKS)  # of ranks, hosts, threads and workers
SEED = whole(-(2**63), 2**64 - 1)  # torch's seeds; multiring's own are any whole numbers
AMOUNT = number(0, above=True)  # such as bytes, or bytes a second
DAY_S = 86_400
SECONDS = NumberOption(float, 0, DAY_S, is_open=True, unit="seconds")  # how long something may take
PAUSE = NumberOption(float, 0, DAY_S, unit="seconds")  # the same, or nothing


def require_numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Raise unless the numbers of `arguments` are within the bounds of the options that `parser` declares.

    Raises:
        ArgumentError: an option has another number. Its default is right whatever it is.
    """
    for action in parser._actions:  # noqa: SLF001 -- argparse has no public name for it
        value: Any = getattr(arguments, action.dest, None)
        if not isinstance(action.type, NumberOption) or value is None or value == action.default:
            continue
        for each in value if isinstance(value, list) else [value]:
            if not action.type.takes(each):
                shown = f"{each:g}" if isinstance(each, float) or not math.isfinite(each) else _digits(each)
                raise ArgumentError(f"{action.option_strings[0]} {shown}: want {action.type.wanted}")


def _digits(value: int) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
