"""What a collective promises, apart from any algorithm: what each chunk holds at first, and must hold at last.

A chunk's content is the set of ranks whose contributions are in it, as an integer bit mask: bit r is rank r,
0 means nothing was put there yet. A chunk may only ever hold pieces of its own home block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from multiring.schedule.frame import Frame
from multiring.schedule.kinds import SUMS, Collective, Space, Wire
from multiring.schedule.layout import Layout, layout_of, scratch_buffers_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The start and the end that a set of programs, one per rank, has to connect.

    `home`, `start` and `want` are indexed by rank, then by chunk.
    """

    home: Sequence[Sequence[int]]  # the block whose pieces the chunk may hold
    start: Sequence[Sequence[int]]  # bit masks
    want: Sequence[Sequence[int]]  # bit masks; 0 where the end does not matter
    complete: int  # the mask of a finished sum; 0 where nothing is summed
    layout: Layout
    channels: int
    roundings: int  # how many REDUCEs a contribution may pass through
    codings: int = 0  # how many lossy wires a contribution may pass until it is summed; the sum may pass as many again
    is_quiet: bool = False  # whether nobody may still read a wanted chunk when its rank is done


def promise_of(frame: Frame, roundings: int) -> Promise:
    """Return what `frame.collective` promises, read off the users' buffers (slots), not off block numbers."""
    ranks, channels = frame.ranks, frame.channels
    layout = layout_of(frame)
    slots, spaces = layout.slot.tolist(), layout.space.tolist()
    sums = frame.collective in SUMS
    everyone = (1 << ranks) - 1
    home, start, want = [], [], []
    scratch_home = list(range(ranks * channels)) * scratch_buffers_of(frame)
    if frame.collective is not Collective.ALL_REDUCE:  # whose blocks go by number everywhere
        scratch_home = (frame.owners() * channels + np.arange(channels)[:, np.newaxis]).ravel().tolist()
    for rank in range(ranks):
        blocks = [
            _home(frame, rank, Space(space), scratch_home[slot] if space == Space.SCRATCH else slot)
            for space, slot in zip(spaces, slots, strict=True)
        ]
        home.append(blocks)
        initial, final = _ends_of(frame, rank)
        start.append([(1 << rank) if Space(space) is initial else 0 for space in spaces])
        want.append(
            [
                (everyone if sums else 1 << _source(frame, slot)) if Space(space) is final else 0
                for space, slot in zip(spaces, slots, strict=True)
            ]
        )
    return Promise(
        home=home,
        start=start,
        want=want,
        complete=everyone if sums else 0,
        layout=layout,
        channels=channels,
        roundings=roundings if sums else 0,
        codings=sum(frame.wire_of(axis) is not Wire.NONE and size > 1 for axis, size in enumerate(frame.grid)),
    )


def _ends_of(frame: Frame, rank: int) -> tuple[Space | None, Space]:
    """Return the space that holds the rank's contribution at first, and the one that must hold the result."""
    if frame.collective is Collective.ALL_REDUCE:
        return Space.OUTPUT, Space.OUTPUT
    if frame.collective is Collective.BROADCAST:
        return (Space.OUTPUT if rank == frame.root else None), Space.OUTPUT
    return Space.INPUT, Space.OUTPUT


def _home(frame: Frame, rank: int, space: Space, slot: int) -> int:
    """Return the number of the block, over all ranks, whose piece belongs at `slot` of `space`."""
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
    """Return the rank whose data a result that is not a sum consists of."""
    return frame.root if frame.collective is Collective.BROADCAST else slot // frame.channels


def scattered_promise(ranks: int, wire: Wire) -> Promise:
    """Return what a reduce-scatter in place promises on a line of `ranks`: rank i ends with part i, undisturbed."""
    everyone = (1 << ranks) - 1
    parts = range(ranks)
    return Promise(
        home=[list(parts) for _ in parts],
        start=[[1 << rank] * ranks for rank in parts],
        want=[[everyone if part == rank else 0 for part in parts] for rank in parts],
        complete=everyone,
        layout=Layout(space=np.full(ranks, Space.OUTPUT, np.uint8), slot=np.arange(ranks, dtype=np.int64)),
        channels=1,
        roundings=ranks,
        codings=1 if wire else 0,
        is_quiet=True,
    )
