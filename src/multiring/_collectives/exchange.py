"""Exchange: along each axis in turn, every rank sends its whole buffer to every other rank, and combines all buffers.

Cost along an axis of p ranks for n bytes: one step of p - 1 messages; every rank sends and receives n (p - 1) bytes,
copies n bytes aside and combines n bytes. Every other all-reduce needs two steps, so exchange is fastest for small n.
On a grid it needs fewer messages, and one step per axis. The contributions of an axis are combined in one move, in the
order of coordinates. So every rank gets the same bits, rounded once per axis.

Peers read the copy, because the rank overwrites its buffer as soon as it has received all contributions.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19(1), 2005, doi:10.1177/1094342005051521 (a similar trade-off: recursive doubling for short messages).
"""

from multiring._collectives.axes import refuse_coded
from multiring._schedule import Accumulation, Effect, Frame, Kind, Move, Moves, Pattern, Phase, Schedule


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
    """Return the all_reduce in which the ranks of every line exchange whole buffers, axis by axis.

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
