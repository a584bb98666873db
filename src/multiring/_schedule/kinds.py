"""Enumerations used by schedules.

Their numbers are part of the native executor's interface.
"""

from collections.abc import Iterable
from enum import Enum, IntEnum


class Kind(IntEnum):
    """The action of a move."""

    SEND = 0  # offer chunks to peers; never blocks; the chunks stay readable until every peer has taken them
    COPY = 1  # take chunks from one peer and overwrite; if the peer is the rank itself: a local copy
    REDUCE = 2  # take chunks from several peers, combine them left to right, write the result


class Space(IntEnum):
    """The memory that holds a chunk.

    In-place collectives use OUTPUT only; INPUT is never written.
    """

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Accumulation(IntEnum):
    """The type in which contributions are summed, and the number of roundings."""

    SAME = 0  # in the array's own type
    WIDE = 1  # 16-bit floats in float32, rounded once per axis of the grid
    ONCE = 2  # as WIDE, but one move sums all contributions: an average of integers never wraps


class Wire(IntEnum):
    """The form of float32 elements on the wire along an axis.

    All but NONE are lossy; _schedule/wire.py has the format of each.
    """

    NONE = 0  # exact float32
    FP16 = 1
    BF16 = 2
    INT8 = 3  # blocks of 256 elements, each with a scale


class Collective(Enum):
    """The collective operations, in the field's spelling."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


def names_of(wires: Iterable[Wire]) -> str:
    """Return the names of wire types in the users' notation, for example "none,bf16"."""
    return ",".join(wire.name.lower() for wire in wires) or "none"


SUMS = frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER})  # the collectives that reduce data
