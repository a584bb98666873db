"""Write the names of many hosts in few characters: node[01-16,20] is node01 to node16 and node20, as in Slurm.

Source: https://slurm.schedmd.com/scontrol.html (hostlist expressions).
"""

import re
from collections.abc import Iterable

from multiring.errors import ArgumentError

_PATTERN = re.compile(r"([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_MOST = 1 << 20


def names_of(pattern: str) -> list[str]:
    """Expand `pattern` into names; a plain name gives itself.

    Raises:
        ArgumentError: `pattern` is neither a name nor a pattern.
    """
    if pattern and not set(pattern) & set("[] \t"):
        return [pattern]
    found = _PATTERN.fullmatch(pattern)
    ranges = [_RANGE.fullmatch(each) for each in found[2].split(",")] if found else [None]
    names: list[str] = []
    for each in ranges:
        first, last = (each[1], each[2] or each[1]) if each else ("1", "0")
        if found is None or int(last) < int(first) or int(last) - int(first) >= _MOST:
            raise ArgumentError(f"{pattern!r} names no hosts: want a name, or a pattern like node[01-16,20]")
        if len(names) + int(last) - int(first) >= _MOST:
            raise ArgumentError(f"{pattern!r} names more than {_MOST} hosts: want fewer")
        names += [f"{found[1]}{number:0{len(first)}d}{found[3]}" for number in range(int(first), int(last) + 1)]
    return names


def patterns_of(names: Iterable[str]) -> list[str]:
    """Return patterns for `names`, in the same order; consecutive numbered names become one pattern."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [_pattern_of(run) for run in runs]


def _follows(one: str, other: str) -> bool:
    a, b = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    if a is None or b is None:
        return False
    return (b[1], b[2], b[3]) == (a[1], f"{int(a[2]) + 1:0{len(a[2])}d}", a[3])


def _pattern_of(run: list[str]) -> str:
    first, last = _NUMBERED.fullmatch(run[0]), _NUMBERED.fullmatch(run[-1])
    if len(run) == 1 or first is None or last is None:
        return run[0]
    return f"{first[1]}[{first[2]}-{last[2]}]{first[3]}"
