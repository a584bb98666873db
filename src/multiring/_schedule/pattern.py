"""Patterns: the parts of a schedule, each an algorithm for the ranks of one line along one axis."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from multiring._schedule.moves import Moves


class Effect(Enum):
    """The effect of a pattern on a line of p ranks whose range of blocks is cut into p parts."""

    REDUCE_SCATTER = "reduce_scatter"  # coordinate i ends with the sum of part i over all coordinates
    ALL_GATHER = "all_gather"  # coordinate i starts with part i; all coordinates end with all parts
    BROADCAST = "broadcast"  # there is one part; coordinate 0 starts with it; all coordinates end with it
    ALL_REDUCE = "all_reduce"  # there is one part; a copy of it is made first; all coordinates end with its sum
    ALL_TO_ALL = "all_to_all"  # coordinate i ends with part i of every coordinate j, stored as its part j


def parts_of(effect: Effect, ranks: int) -> int:
    """Return the number of parts into which a pattern with this effect cuts the range of a line of `ranks`."""
    return 1 if effect in {Effect.BROADCAST, Effect.ALL_REDUCE} else ranks


@dataclass(frozen=True, slots=True)
class Pattern:
    """An algorithm along one axis.

    `program(p, i)` returns the moves of coordinate i on a line of p ranks. In these moves chunks are part numbers and
    peers are coordinates; `last` marks the REDUCE that completes the sum of the line. A move reads and writes the same
    part number. The name determines the program: it is part of the schedule's digest.
    """

    name: str
    effect: Effect
    program: Callable[[int, int], Moves]


@dataclass(frozen=True, slots=True)
class Phase:
    """`pattern` along `axis`, on all lines of that axis at once."""

    axis: int
    pattern: Pattern
