"""Binomial tree: a broadcast in ceil(log2 p) hops.

Cost along an axis of p ranks for n bytes: ceil(log2 p) steps of n bytes, at the root and on the longest path.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19(1), 2005, doi:10.1177/1094342005051521.
"""

from multiring._schedule import Accumulation, Effect, Frame, Kind, Move, Moves, Pattern, Phase, Schedule


def _broadcast(p: int, i: int) -> Moves:
    # Coordinate i receives from coordinate i without its lowest set bit. So a subtree has consecutive coordinates,
    # mostly of one host. The first message goes to the child with the largest subtree.
    lowest = i & -i if i else 1 << (p - 1).bit_length()
    steps = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
    children = tuple(i + step for step in steps if i + step < p)
    rows = []
    if i:
        rows.append(Move(Kind.COPY, 0, -1, 0, 1, False, (i - lowest,)))
    if children:
        rows.append(Move(Kind.SEND, 0, 0, -1, 1, False, children))
    return Moves.of(rows)


BROADCAST = Pattern("tree_broadcast", Effect.BROADCAST, _broadcast)


def tree_broadcast(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the broadcast over a binomial tree along every axis, slowest links first."""
    return Schedule(
        algorithm="tree",
        frame=frame,
        phases=tuple(Phase(axis, BROADCAST) for axis in reversed(range(len(frame.grid)))),
        accumulation=accumulation,
    )
