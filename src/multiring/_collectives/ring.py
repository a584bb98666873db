"""Rings: every rank exchanges messages with its two neighbours only.

Cost along an axis of p ranks with an n-byte range: p - 1 steps for the reduce-scatter and p - 1 for the all-gather. In
each of these two phases, a rank sends and receives n (p - 1) / p bytes. A part is rounded at every rank that it passes,
so a ring rejects wide accumulation and lossy wires.

Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

import numpy as np

from multiring._collectives.axes import over_axes, refuse_coded
from multiring._schedule import Accumulation, Effect, Frame, Kind, Moves, Pattern, Schedule
from multiring.errors import ScheduleError


def _reduce_scatter(p: int, i: int) -> Moves:
    # After step s coordinate i holds the sum of s + 2 contributions to part i - s - 2, so it ends with part i.
    step = np.arange(p - 1)
    return _steps(Kind.REDUCE, (i - step - 1) % p, (i - step - 2) % p, i, p)


def _all_gather(p: int, i: int) -> Moves:
    # Every finished part travels once round the ring.
    step = np.arange(p - 1)
    return _steps(Kind.COPY, (i - step) % p, (i - step - 1) % p, i, p)


def _steps(kind: Kind, sent: np.ndarray, taken: np.ndarray, i: int, p: int) -> Moves:
    """Return moves in pairs: SEND a chunk of `sent` to the next rank, then take a chunk of `taken` by `kind`."""
    steps = len(sent)
    reduces = kind is Kind.REDUCE
    sources = [(i - 1) % p, i] if reduces else [(i - 1) % p]
    pair = np.array([(i + 1) % p, *sources], np.int32)
    return Moves(
        kind=np.tile(np.array([Kind.SEND, kind], np.uint8), steps),
        channel=np.zeros(2 * steps, np.uint16),
        src=np.column_stack([sent, taken if reduces else np.full(steps, -1)]).ravel().astype(np.int32),
        dst=np.column_stack([np.full(steps, -1), taken]).ravel().astype(np.int32),
        span=np.ones(2 * steps, np.int32),
        last=np.arange(2 * steps) == (2 * steps - 1 if reduces else -1),
        peer_start=np.cumsum([0, *([1, len(sources)] * steps)], dtype=np.int32),
        peers=np.tile(pair, steps),
    )


REDUCE_SCATTER = Pattern("ring_reduce_scatter", Effect.REDUCE_SCATTER, _reduce_scatter)
ALL_GATHER = Pattern("ring_all_gather", Effect.ALL_GATHER, _all_gather)


def refuse_wide(accumulation: Accumulation) -> None:
    """Raise ScheduleError unless `accumulation` allows a rounding at every step of a ring."""
    if accumulation is not Accumulation.SAME:
        raise ScheduleError(
            f"a ring rounds every partial sum, so it cannot accumulate {accumulation.name.lower()}: use direct"
        )


def ring(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the schedule with a ring along every axis.

    Raises:
        ScheduleError: `accumulation` is not SAME, or an axis has a lossy wire.
    """
    refuse_wide(accumulation)
    axes = range(len(frame.grid))
    refuse_coded("a ring", frame, axes)
    return over_axes("ring", frame, accumulation, [(REDUCE_SCATTER, ALL_GATHER) for _ in axes])
