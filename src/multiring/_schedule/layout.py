"""The layout of chunks: the table that maps chunk numbers to memory.

A chunk is one channel's piece of one block, in one space. Within a space chunks are stored without gaps, in the order
of their slots. So two chunks are contiguous exactly if their slots are consecutive, whatever their sizes.
With p ranks on the grid and K channels the chunks are numbered, channel by channel:

    all_reduce       OUTPUT p K, SCRATCH (2 axes - 1) p K: whole buffers, one after the other
    broadcast        OUTPUT K
    reduce_scatter   INPUT p K, OUTPUT K (the own block), SCRATCH p K
    all_gather       INPUT K (the own block), OUTPUT p K
    all_to_all       INPUT p K (by receiver), OUTPUT p K (by sender)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.frame import Frame
from multiring._schedule.kinds import Collective, Space, Wire
from multiring._schedule.wire import FORMATS
from multiring.errors import ScheduleError

# Boundaries of an even split are multiples of this many elements: whole vectors, whole cache lines of float32.
GRAIN = 16


def grain_of(frame: Frame) -> int:
    """Return the granularity of cuts, in elements: all cuts are at its multiples.

    So a cut never splits a block of elements that share a scale.
    """
    return math.lcm(GRAIN, *(FORMATS[wire].block for wire in frame.wires if wire is not Wire.NONE))


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The space and the slot of each of one rank's chunks: arrays over chunk numbers."""

    space: NDArray[np.uint8]
    slot: NDArray[np.int64]


class Splits(NamedTuple):
    """One rank's counts for an all_to_all: elements sent to each rank, and elements received from each rank."""

    send: Sequence[int]
    receive: Sequence[int]


@dataclass(frozen=True, eq=False, slots=True)
class Extents:
    """One rank's chunks in memory: arrays over chunk numbers, offsets and counts in elements."""

    space: NDArray[np.uint8]
    offset: NDArray[np.int64]
    count: NDArray[np.int64]
    scratch_count: int


Counts = int | Sequence[int] | Splits


@dataclass(frozen=True, kw_only=True, slots=True)
class Bases:
    """The first chunk number of each space.

    It is -1 if the collective does not use the space.
    """

    input: int = -1
    output: int = -1
    scratch: int = -1


def bases_of(frame: Frame) -> Bases:
    """Return the first chunk number of each space."""
    one, all_blocks = frame.channels, frame.channels * frame.blocks
    return {
        Collective.ALL_REDUCE: Bases(output=0, scratch=all_blocks),
        Collective.BROADCAST: Bases(output=0),
        Collective.REDUCE_SCATTER: Bases(input=0, output=all_blocks, scratch=all_blocks + one),
        Collective.ALL_GATHER: Bases(input=0, output=one),
        Collective.ALL_TO_ALL: Bases(input=0, output=all_blocks),
    }[frame.collective]


def layout_of(frame: Frame) -> Layout:
    """Return the space and slot of every chunk; the table is the same on every rank."""
    own = np.arange(frame.channels)
    in_turn = np.arange(frame.channels * frame.blocks)
    # A block's pieces for the channels lie side by side, and blocks follow each other by rank.
    by_rank = (frame.owners().astype(np.int64) * frame.channels + own[:, np.newaxis]).ravel()
    pieces = {
        Collective.ALL_REDUCE: (
            (Space.OUTPUT, in_turn),
            (Space.SCRATCH, np.arange(len(in_turn) * scratch_buffers_of(frame))),
        ),
        Collective.BROADCAST: ((Space.OUTPUT, own),),
        Collective.REDUCE_SCATTER: ((Space.INPUT, by_rank), (Space.OUTPUT, own), (Space.SCRATCH, in_turn)),
        Collective.ALL_GATHER: ((Space.INPUT, own), (Space.OUTPUT, by_rank)),
        Collective.ALL_TO_ALL: ((Space.INPUT, by_rank), (Space.OUTPUT, by_rank)),
    }[frame.collective]
    return Layout(
        space=np.concatenate([np.full(len(slots), space, np.uint8) for space, slots in pieces]),
        slot=np.concatenate([slots for _, slots in pieces]).astype(np.int64),
    )


def scratch_buffers_of(frame: Frame) -> int:
    """Return the number of whole scratch buffers of an all_reduce.

    Each axis needs one buffer for the data to send, and every two successive axes need one buffer between them.
    """
    return 2 * len(frame.grid) - 1


def breaks_of(frame: Frame) -> NDArray[np.bool_]:
    """Return, for every block, whether the user's buffer has a gap between it and the block before: shape (blocks,)."""
    if frame.collective in {Collective.ALL_REDUCE, Collective.BROADCAST}:
        return np.zeros(frame.blocks, np.bool_)
    if frame.channels > 1:
        return np.ones(frame.ranks, np.bool_)
    breaks: NDArray[np.bool_] = np.diff(frame.owners(), prepend=-1) != 1
    return breaks


def extents_of(frame: Frame, rank: int, counts: Counts, used: NDArray[np.bool_]) -> Extents:
    """Return the memory of `rank`'s chunks.

    Args:
        frame: the frame of the schedule.
        rank: the rank; only the sizes of chunks differ between ranks.
        counts: elements of the whole buffer (all_reduce, broadcast), of each rank's block (reduce_scatter,
            all_gather), or sent to and received from each rank (all_to_all).
        used: whether the rank's moves touch each chunk; unused scratch chunks get no memory.

    Raises:
        ScheduleError: `counts` has a wrong form or length, or a negative number.
    """
    layout = layout_of(frame)
    sizes = _sizes_of(frame, rank, counts)
    count = np.zeros(len(layout.slot), np.int64)
    offset = np.zeros(len(layout.slot), np.int64)
    for space, whole in sizes.items():
        chunks = np.flatnonzero(layout.space == space)
        by_slot = whole.copy()
        if space is Space.SCRATCH:
            by_slot[layout.slot[chunks[~used[chunks]]]] = 0
        count[chunks] = by_slot[layout.slot[chunks]]
        offset[chunks] = (np.cumsum(by_slot) - by_slot)[layout.slot[chunks]]
    scratch = int(count[layout.space == Space.SCRATCH].sum())
    return Extents(space=layout.space, offset=offset, count=count, scratch_count=scratch)


def _sizes_of(frame: Frame, rank: int, counts: Counts) -> dict[Space, NDArray[np.int64]]:
    """Return the number of elements in each slot of each space."""
    frame.refuse_other(rank)
    if frame.collective in {Collective.ALL_REDUCE, Collective.BROADCAST}:
        if not isinstance(counts, int) or counts < 0:
            raise ScheduleError(f"counts={counts!r}: {frame.collective.value} wants one number of elements >= 0")
        if frame.collective is Collective.BROADCAST:
            return {Space.OUTPUT: split(counts, frame.shares)}
        blocks, grain = (1,) * frame.blocks, grain_of(frame)
        pieces = np.concatenate([split(int(n), blocks, grain) for n in split(counts, frame.shares, grain)])
        return {Space.OUTPUT: pieces, Space.SCRATCH: np.tile(pieces, scratch_buffers_of(frame))}
    if frame.collective is Collective.ALL_TO_ALL:
        if not isinstance(counts, Splits):
            raise ScheduleError(f"counts={counts!r}: all_to_all wants Splits(send, receive)")
        return {
            Space.INPUT: _pieces(frame, counts.send),
            Space.OUTPUT: _pieces(frame, counts.receive),
        }
    if isinstance(counts, int | Splits):
        raise ScheduleError(f"counts={counts!r}: {frame.collective.value} wants the elements of every rank's block")
    every, own = _pieces(frame, counts), split(int(counts[rank]), frame.shares)
    if frame.collective is Collective.ALL_GATHER:
        return {Space.INPUT: own, Space.OUTPUT: every}
    # Scratch is ordered by channel, then by block. The user's buffer is ordered by rank, then by channel.
    scratch = every.reshape(frame.ranks, frame.channels)[frame.owners()].T.ravel()
    return {Space.INPUT: every, Space.OUTPUT: own, Space.SCRATCH: scratch}


def _pieces(frame: Frame, counts: Sequence[int]) -> NDArray[np.int64]:
    if len(counts) != frame.ranks or any(count < 0 for count in counts):
        raise ScheduleError(f"counts={list(counts)}: want {frame.ranks} numbers of elements >= 0, one per rank")
    if frame.channels == 1:
        return np.asarray(counts, np.int64)
    return np.concatenate([split(int(count), frame.shares) for count in counts])


def split(elements: int, weights: Sequence[int], grain: int = GRAIN) -> NDArray[np.int64]:
    """Return the sizes of the pieces of `elements` in proportion to `weights`, cut at multiples of `grain`."""
    ends = np.cumsum(weights, dtype=np.int64)
    bounds = elements * ends // ends[-1] // grain * grain
    bounds[-1] = elements
    sizes: NDArray[np.int64] = np.diff(bounds, prepend=0)
    return sizes
