"""Patterns: what the ranks of one line do along one axis; the pieces a schedule is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from multiring.schedule.moves import Moves


class Effect(Enum):
    """What a pattern does to a line of p ranks whose range of blocks is cut into p parts."""

    REDUCE_SCATTER = "reduce_scatter"  # coordinate i ends with the sum of all parts i
    ALL_GATHER = "all_gather"  # coordinate i starts with part i; all end with all parts
    BROADCAST = "broadcast"  # coordinate 0 starts with the one part; all end with it
    ALL_REDUCE = "all_reduce"  # all end with the sum of the one part there is, which is copied aside first
    ALL_TO_ALL = "all_to_all"  # coordinate i ends with part i of every other, as its part j from j


def parts_of(effect: Effect, ranks: int) -> int:
    """Return how many parts a pattern of that effect cuts the range of a line of `ranks` into."""
    return 1 if effect in {Effect.BROADCAST, Effect.ALL_REDUCE} else ranks


@dataclass(frozen=True, slots=True)
class Pattern:
    """An algorithm along one axis.

    `program(p, i)` returns what coordinate i of a line of p does: chunks are part numbers, peers are
    coordinates, and `last` says that the whole line is in. A move reads and writes the same part
    number. The name determines the program: it goes into the schedule's digest.
    """

    name: str
    effect: Effect
    program: Callable[[int, int], Moves]


@dataclass(frozen=True, slots=True)
class Phase:
    """`pattern` along `axis`, on all lines of that axis at once."""

    axis: int
    pattern: Pattern
