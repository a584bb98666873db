"""The lines by which a script reports: that of `multiring.trials.report`, and those of the script itself."""

import math
import re
import sys
from typing import Any, NamedTuple

from multiring.trials.trial import checked_report

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:inf(?:inity)?|nan))"
_OWN = re.compile(rf"multiring trial: step (\d+): ({_NUMBER})$")
# "0,53" and "1,234" have a comma within a number, which another country's program means otherwise: neither is read.
_NO_COMMA = r"(?![-+]?\d+,\d)"
_NOT_WITHIN = r"(?<!\d)(?<!\d[.,])"  # a number whose beginning did not fit
_PLACE = re.compile(r"(\{\w*\})")


class ReportedValue(NamedTuple):
    """A value that a script has reported."""

    step: int | None  # None: the line has none
    value: float


def report(value: Any, step: int) -> None:
    """Report an intermediate value of this script to `multiring trials run`, which prunes trials by it.

    The call prints one line. Without `multiring trials run` nobody reads it. On a job of several ranks, every rank may
    call it; the lines of rank 0 count.

    Args:
        value: a number, or an array of one number.
        step: a whole number from 0 on, which was not reported before, such as the epoch.

    Raises:
        ArgumentError: the value is no number, or the step is wrong.
    """
    found, number = checked_report(value, step)
    # In one write, so that lines of other threads do not come in between.
    sys.stdout.write(own_line(number, found) + "\n")
    sys.stdout.flush()


def own_line(step: int, value: float) -> str:
    """Return the line of `report`."""
    return f"multiring trial: step {step}: {value!r}"


def own_report(line: str) -> ReportedValue | None:
    """Return what a line of `report` says; None for another line."""
    found = _OWN.search(line.rstrip())
    return None if found is None else ReportedValue(int(found[1]), float(found[2]))


class LinePattern:
    """A line of a script with {value}, perhaps with {step}; {} stands for anything.

    Spaces match any number of spaces. The line may have more before and after the pattern. Numbers have a point, not a
    comma: "0,53" is no value, except that a pattern may have a comma after {value}.

    Args:
        text: the pattern, as in "epoch {step}: loss {value}".
        has_step: whether {step} may be there.

    Raises:
        ValueError: {value} is missing or there twice, or another name is in braces.
    """

    def __init__(self, text: str, *, has_step: bool) -> None:
        self.text = text
        known = {"{value}": rf"(?P<value>{_NUMBER})(?!\w|\.\d)", "{}": ".*?"}
        if has_step:
            known["{step}"] = r"(?P<step>\d+)"
        parts = _PLACE.split(text)
        for each in parts:
            if _PLACE.fullmatch(each) and each not in known:
                raise ValueError(f"{text!r} has {each}: want {', '.join(known)}")
            if each not in ("", "{}") and parts.count(each) > 1 and each in known:
                raise ValueError(f"{text!r} has {each} twice")
        if "{value}" not in parts:
            raise ValueError(f"{text!r}: want a line with {{value}}, as in 'loss {{value}}'")
        before, after = parts[(at := parts.index("{value}")) - 1], parts[at + 1]
        guard = ("" if before else _NOT_WITHIN) + ("" if after.startswith(",") else _NO_COMMA)
        known["{value}"] = guard + known["{value}"]
        words = [known.get(each) or r"\s+".join(map(re.escape, re.split(r"\s+", each))) for each in parts]
        self._pattern = re.compile("".join(words))

    def found_in(self, line: str) -> ReportedValue | None:
        """Return what a line says; None if it does not match."""
        found = self._pattern.search(line)
        if found is None:
            return None
        step = found.groupdict().get("step")
        return ReportedValue(None if step is None else int(step), float(found["value"]))


def value_problem(values: list[ReportedValue]) -> str:
    """Return why a trial that ended normally has no value, or nothing."""
    if not values:
        return "never reported"
    return "the last value is NaN" if math.isnan(values[-1].value) else ""
