"""The promise of a collective, independent of any algorithm: the contents of chunks at the start and at the end.

A chunk's content is the set of ranks whose contributions are in it, as an integer bit mask: bit r is rank r, and
0 means that the chunk is empty. A chunk may only ever hold pieces of its own home block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from multiring._schedule.frame import Frame
from multiring._schedule.kinds import SUMS, Collective, Space, Wire
from multiring._schedule.layout import Layout, layout_of, scratch_buffers_of

OfChunk = Callable[[int, int], int]  # called with a rank and a chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The contents of chunks at the start, and the contents that a set of programs, one per rank, must produce."""

    ranks: int
    home: OfChunk  # the block whose pieces the chunk may hold
    start: OfChunk  # a bit mask
    want: OfChunk  # a bit mask; 0 if the final content does not matter
    complete: int  # the mask of a finished sum; 0 if the collective does not sum
    layout: Layout
    channels: int
    roundings: int  # the number of REDUCEs that a contribution may pass
    codings: int = 0  # the most lossy wires of a contribution before it is summed; the same number may follow the sum
    is_quiet: bool = False  # whether all readers of a wanted chunk must be done when its rank is done
    turns: bool = False  # whether rank i's promise is rank 0's, with ranks and chunks rotated by i (turn.py)
    stays: bool = False  # whether rank i's promise is rank 0's, with ranks rotated by i and chunks unchanged
    pairs: bool = False  # whether a home is a pair of ranks, from * ranks + to, instead of one block of `ranks`


def promise_of(frame: Frame, roundings: int) -> Promise:
    """Return the promise of `frame.collective`, derived from the users' buffers (slots), not from block numbers."""
    ranks, channels = frame.ranks, frame.channels
    layout = layout_of(frame)
    slots, spaces = layout.slot.tolist(), [Space(space) for space in layout.space.tolist()]
    sums = frame.collective in SUMS
    everyone = (1 << ranks) - 1
    is_plain_line = len(frame.grid) == channels == 1 and frame.order == tuple(range(ranks)) and not frame.joined
    scratch_home = list(range(frame.blocks * channels)) * scratch_buffers_of(frame)
    if frame.collective is not Collective.ALL_REDUCE:  # an all_reduce uses block numbers in every space
        scratch_home = (frame.owners() * channels + np.arange(channels)[:, np.newaxis]).ravel().tolist()

    def home(rank: int, chunk: int) -> int:
        space, slot = spaces[chunk], slots[chunk]
        return _home(frame, rank, space, scratch_home[slot] if space is Space.SCRATCH else slot)

    def start(rank: int, chunk: int) -> int:
        return 1 << rank if spaces[chunk] is _first_space(frame, rank) else 0

    def want(_: int, chunk: int) -> int:
        if spaces[chunk] is not Space.OUTPUT:
            return 0
        return everyone if sums else 1 << _source(frame, slots[chunk])

    return Promise(
        ranks=ranks,
        home=home,
        start=start,
        want=want,
        complete=everyone if sums else 0,
        layout=layout,
        channels=channels,
        roundings=roundings if sums else 0,
        codings=sum(frame.wire_of(axis) is not Wire.NONE and size > 1 for axis, size in enumerate(frame.grid)),
        turns=is_plain_line and frame.collective is not Collective.BROADCAST,
        stays=is_plain_line and frame.collective is Collective.ALL_REDUCE,
        pairs=frame.collective is Collective.ALL_TO_ALL,
    )


def _first_space(frame: Frame, rank: int) -> Space | None:
    """Return the space that holds the rank's contribution at the start."""
    if frame.collective is Collective.ALL_REDUCE:
        return Space.OUTPUT
    if frame.collective is Collective.BROADCAST:
        return Space.OUTPUT if rank == frame.root else None
    return Space.INPUT


def _home(frame: Frame, rank: int, space: Space, slot: int) -> int:
    """Return the number, over all ranks, of the block whose piece belongs at `slot` of `space`."""
    peer, channel = divmod(slot, frame.channels)
    if frame.collective is Collective.REDUCE_SCATTER and space is Space.OUTPUT:
        return rank * frame.channels + channel
    if frame.collective is Collective.ALL_GATHER and space is Space.INPUT:
        return rank * frame.channels + channel
    if frame.collective is Collective.ALL_TO_ALL:
        pair = (rank, peer) if space is Space.INPUT else (peer, rank)
        return (pair[0] * frame.ranks + pair[1]) * frame.channels + channel
    return slot


def _source(frame: Frame, slot: int) -> int:
    """Return the rank whose data are the result in `slot`, for collectives that do not sum."""
    return frame.root if frame.collective is Collective.BROADCAST else slot // frame.channels


def scattered_promise(ranks: int, wire: Wire) -> Promise:
    """Return the promise of an in-place reduce-scatter: rank i ends with part i, and no rank still reads the part."""
    everyone = (1 << ranks) - 1
    return Promise(
        ranks=ranks,
        home=lambda _, chunk: chunk,
        start=lambda rank, _: 1 << rank,
        want=lambda rank, chunk: everyone if chunk == rank else 0,
        complete=everyone,
        layout=Layout(space=np.full(ranks, Space.OUTPUT, np.uint8), slot=np.arange(ranks, dtype=np.int64)),
        channels=1,
        roundings=ranks,
        codings=1 if wire else 0,
        is_quiet=True,
        turns=True,
    )
