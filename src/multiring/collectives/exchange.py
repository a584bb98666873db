"""Exchange: every rank sends its whole buffer to every other, and each combines them all for itself.

Cost for p ranks and n bytes, on one line: one step of p - 1 messages, n (p - 1) bytes sent and as many received, n
copied aside and n combined. One step where every other all-reduce needs two, so it wins while n is small. All
contributions meet in one move, in the order of coordinates: every rank gets the same bits, rounded once.

The copy aside is what peers read: the buffer itself is overwritten as soon as they have all been heard.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19(1), 2005, doi:10.1177/1094342005051521 (recursive doubling serves short messages there, by the same trade).
"""

from dataclasses import replace

from multiring.schedule import Accumulation, Effect, Frame, Kind, Move, Moves, Pattern, Phase, Schedule


def _all_reduce(p: int, i: int) -> Moves:
    if p == 1:
        return Moves.of(())
    others = tuple((i + distance) % p for distance in range(1, p))
    return Moves.of(
        [
            Move(Kind.COPY, 0, 0, 0, 1, False, (i,)),
            Move(Kind.SEND, 0, 0, -1, 1, False, others),
            Move(Kind.REDUCE, 0, 0, 0, 1, True, tuple(range(p))),
        ]
    )


ALL_REDUCE = Pattern("exchange_all_reduce", Effect.ALL_REDUCE, _all_reduce)


def exchange(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the all_reduce in which every pair of ranks exchanges whole buffers; it lays the grid out as one axis."""
    return Schedule(
        algorithm="exchange",
        frame=replace(frame, grid=(frame.ranks,)),
        phases=(Phase(0, ALL_REDUCE),),
        accumulation=accumulation,
    )
