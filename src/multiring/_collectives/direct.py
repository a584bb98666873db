"""Direct: every rank of a line sends to every other rank at once.

Cost along an axis of p ranks with an n-byte range: one step of p - 1 messages; every rank sends and receives
n (p - 1) / p bytes. These are the ring's bytes with the latency of one step. A part is reduced in one move from all
ranks, in the order of their coordinates, so 16-bit floats are rounded once.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19(1), 2005, doi:10.1177/1094342005051521 (the pairwise algorithms).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from multiring._collectives.axes import over_axes
from multiring._schedule import Accumulation, Effect, Frame, Kind, Moves, Pattern, Phase, Schedule

# Every rank sends to the next rank first, then to the rank after it, so each receiver has one sender at a time.


def _reduce_scatter(p: int, i: int) -> Moves:
    if p == 1:
        return Moves.of(())
    others = (i + np.arange(1, p)) % p
    return Moves(
        kind=np.array([Kind.SEND] * (p - 1) + [Kind.REDUCE], np.uint8),
        channel=np.zeros(p, np.uint16),
        src=np.append(others, i).astype(np.int32),
        dst=np.append(np.full(p - 1, -1), i).astype(np.int32),
        span=np.ones(p, np.int32),
        last=np.arange(p) == p - 1,
        peer_start=np.append(np.arange(p), 2 * p - 1).astype(np.int32),
        peers=np.append(others, np.arange(p)).astype(np.int32),
    )


def _all_gather(p: int, i: int) -> Moves:
    if p == 1:
        return Moves.of(())
    return _one_to_many_and_back(i, (i + np.arange(1, p)) % p, (i - np.arange(1, p)) % p)


def _one_to_many_and_back(i: int, to: NDArray[np.intp], taken: NDArray[np.intp]) -> Moves:
    """Return a SEND of part i to every coordinate in `to`, then a COPY of part j from each coordinate j in `taken`."""
    copies = len(taken)
    return Moves(
        kind=np.array([Kind.SEND] + [Kind.COPY] * copies, np.uint8),
        channel=np.zeros(1 + copies, np.uint16),
        src=np.array([i] + [-1] * copies, np.int32),
        dst=np.append(-1, taken).astype(np.int32),
        span=np.ones(1 + copies, np.int32),
        last=np.zeros(1 + copies, np.bool_),
        peer_start=np.append(0, len(to) + np.arange(1 + copies)).astype(np.int32),
        peers=np.append(to, taken).astype(np.int32),
    )


def _broadcast(p: int, i: int) -> Moves:
    if p == 1:
        return Moves.of(())
    if i == 0:
        nobody = np.zeros(0, np.intp)
        return _one_to_many_and_back(0, np.arange(1, p), nobody)
    zero = np.zeros(1, np.int32)
    return Moves(
        kind=np.array([Kind.COPY], np.uint8),
        channel=np.zeros(1, np.uint16),
        src=zero - 1,
        dst=zero,
        span=zero + 1,
        last=np.zeros(1, np.bool_),
        peer_start=np.array([0, 1], np.int32),
        peers=zero,
    )


def _all_to_all(p: int, i: int) -> Moves:
    to, taken = (i + np.arange(1, p)) % p, (i - np.arange(1, p)) % p
    return Moves(
        kind=np.array([Kind.SEND] * (p - 1) + [Kind.COPY] * p, np.uint8),
        channel=np.zeros(2 * p - 1, np.uint16),
        src=np.concatenate([to, [i], np.full(p - 1, -1)]).astype(np.int32),
        dst=np.concatenate([np.full(p - 1, -1), [i], taken]).astype(np.int32),
        span=np.ones(2 * p - 1, np.int32),
        last=np.zeros(2 * p - 1, np.bool_),
        peer_start=np.arange(2 * p, dtype=np.int32),
        peers=np.concatenate([to, [i], taken]).astype(np.int32),
    )


REDUCE_SCATTER = Pattern("direct_reduce_scatter", Effect.REDUCE_SCATTER, _reduce_scatter)
ALL_GATHER = Pattern("direct_all_gather", Effect.ALL_GATHER, _all_gather)
BROADCAST = Pattern("direct_broadcast", Effect.BROADCAST, _broadcast)
ALL_TO_ALL = Pattern("direct_all_to_all", Effect.ALL_TO_ALL, _all_to_all)


def direct(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the schedule that is direct along every axis, for an all_reduce, reduce_scatter or all_gather."""
    axes = range(len(frame.grid))
    return over_axes("direct", frame, accumulation, [(REDUCE_SCATTER, ALL_GATHER) for _ in axes])


def direct_broadcast(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the broadcast that is direct along every axis, slowest links first."""
    return Schedule(
        algorithm="direct",
        frame=frame,
        phases=tuple(Phase(axis, BROADCAST) for axis in reversed(range(len(frame.grid)))),
        accumulation=accumulation,
    )


def direct_all_to_all(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the all_to_all in which every pair of ranks exchanges its blocks.

    The grid becomes one axis.
    """
    return Schedule(
        algorithm="direct",
        frame=replace(frame, grid=(frame.ranks,)),
        phases=(Phase(0, ALL_TO_ALL),),
        accumulation=accumulation,
    )
