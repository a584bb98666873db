"""The closed sets of words a schedule is written in. Their numbers are part of the native executor's interface."""

from collections.abc import Iterable
from enum import Enum, IntEnum


class Kind(IntEnum):
    """What a move does."""

    SEND = 0  # offer chunks to peers; never blocks; they stay readable until every peer has taken them
    COPY = 1  # take chunks from one peer and overwrite; from oneself: a local copy
    REDUCE = 2  # take chunks from several peers, combine them left to right, write the result


class Space(IntEnum):
    """Which memory a chunk lies in. Collectives that work in place use OUTPUT only; nobody ever writes INPUT."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Accumulation(IntEnum):
    """In what type, and how often rounded, contributions are summed."""

    SAME = 0  # in the array's own type
    WIDE = 1  # 16-bit floats in float32, rounded once per axis of the grid
    ONCE = 2  # as WIDE, and all contributions meet in one move: an average of integers never wraps


class Wire(IntEnum):
    """In what form float32 elements travel along an axis; all but NONE lose bits. schedule/wire.py says which."""

    NONE = 0  # as they are
    FP16 = 1
    BF16 = 2
    INT8 = 3  # blocks of 256 elements, with a scale each


class Collective(Enum):
    """What the ranks do together, in the field's spelling."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


def names_of(wires: Iterable[Wire]) -> str:
    """Return the names of wire types, as people write them: "none,bf16"."""
    return ",".join(wire.name.lower() for wire in wires) or "none"


SUMS = frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER})  # the collectives that reduce
