"""Exchange: along each axis in turn, every rank sends all it has to every other, and each combines for itself.

Cost along an axis of p ranks for n bytes: one step of p - 1 messages, n (p - 1) bytes sent and as many received, n
copied aside and n combined. One step where every other all-reduce needs two, so it wins while n is small; on a grid
there are fewer messages, one step an axis. The contributions of an axis meet in one move, in the order of coordinates:
every rank gets the same bits, rounded once an axis.

The copy aside is what peers read: the buffer itself is overwritten as soon as they have all been heard.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19(1), 2005, doi:10.1177/1094342005051521 (recursive doubling serves short messages there, by the same trade).
"""

from multiring.collectives.axes import refuse_coded
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
    """Return the all_reduce in which the ranks of every line exchange whole buffers, along one axis after the other.

    Raises:
        ScheduleError: an axis has a lossy wire.
    """
    refuse_coded("an exchange", frame, range(len(frame.grid)))
    return Schedule(
        algorithm="exchange",
        frame=frame,
        phases=tuple(Phase(axis, ALL_REDUCE) for axis in range(len(frame.grid))),
        accumulation=accumulation,
    )
