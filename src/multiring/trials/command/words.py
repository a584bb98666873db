"""The words of a trial's command, whose parameters have braces around them, as in `--rate {rate}`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_NAME = re.compile(r"\{(\w+)\}")


def names_in(word: str) -> list[str]:
    """Return the names in braces of a word."""
    return _NAME.findall(word)


def filled(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the words with the values of the parameters that they name. Other braces stay as they are."""
    return [
        _NAME.sub(lambda found: _shown(values[found[1]]) if found[1] in values else found[0], each) for each in words
    ]


def command_line(words: Sequence[str], params: Mapping[str, Any], number: int, ranks: int) -> str:
    """Return the command that runs a trial by itself, for a shell."""
    return shlex.join(["multiring", "run", "-n", str(ranks), "--", *filled(words, {**params, "trial": number})])


def _shown(value: Any) -> str:
    """Return a value as a program reads it: a number in the shortest form that gives it again, and true or false."""
    return str(value).lower() if isinstance(value, bool) else str(value)
