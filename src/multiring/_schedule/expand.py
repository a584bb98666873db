"""Expand the phases of a schedule into the moves of one rank.

A phase's pattern uses part numbers and coordinates of a line; this module maps parts to chunks and coordinates to
ranks. A part becomes one move if its chunks are contiguous in memory, and several moves otherwise. Both ends of a
message cut the part in the same way, because both use the same table of breaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.frame import Frame
from multiring._schedule.kinds import Collective, Kind
from multiring._schedule.layout import bases_of, breaks_of
from multiring._schedule.moves import NOWHERE, Move, Moves
from multiring._schedule.pattern import Effect, Phase

_SUMS = frozenset({Effect.REDUCE_SCATTER, Effect.ALL_REDUCE})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Chunk numbers of block 0 on channel 0 where a phase reads and writes its blocks."""

    before: int  # for blocks that this phase has not written
    after: int  # for blocks that this phase has written
    finished: int | None = None  # first chunk of OUTPUT for the parts that this phase completes; None: as `after`
    scattered: bool = True  # whether gaps in the user's buffer cut a part into several moves


def expand(frame: Frame, phases: Sequence[Phase], rank: int) -> Moves:
    """Return the moves of `rank` in all phases, in order.

    Raises:
        ScheduleError: there is no such rank.
    """
    frame.refuse_other(rank)
    if frame.joins(rank) != rank:
        return _joining(frame, frame.joins(rank))
    coordinates = frame.coordinates_of(rank)
    busy = [phase for phase in phases if frame.grid[phase.axis] > 1]
    pieces = [_opening(frame, rank, coordinates, copies=not busy)]
    if frame.joined_to(rank):
        pieces.append(_adding(frame, rank, completes=not busy))
    for index, phase in enumerate(busy):
        if phase.pattern.effect is Effect.BROADCAST and not _has_it(frame, phase.axis, coordinates):
            continue
        places = _places_of(frame, phase, index, is_final=index == len(busy) - 1)
        completes = not any(later.pattern.effect in _SUMS for later in busy[index + 1 :])
        pieces.append(_phase(frame, phase, rank, places, completes=completes))
    if frame.joined_to(rank):
        pieces.append(_handing_out(frame, rank))
    return Moves.concatenate(pieces)


def _joining(frame: Frame, partner: int) -> Moves:
    """Return the moves of a rank outside the grid: send its buffer to `partner`, then receive the result."""
    parts = _of_channels(frame)
    return Moves.of(
        [
            *(Move(Kind.SEND, channel, first, NOWHERE, frame.blocks, False, (partner,)) for channel, first in parts),
            *(Move(Kind.COPY, channel, NOWHERE, first, frame.blocks, False, (partner,)) for channel, first in parts),
        ]
    )


def _adding(frame: Frame, rank: int, *, completes: bool) -> Moves:
    """Return the moves with which a grid rank adds the buffers of its joining ranks, before the first axis."""
    peers = (rank, *frame.joined_to(rank))
    return Moves.of(
        Move(Kind.REDUCE, channel, first, first, frame.blocks, completes, peers)
        for channel, first in _of_channels(frame)
    )


def _handing_out(frame: Frame, rank: int) -> Moves:
    """Return the moves with which a grid rank sends the result to its joining ranks, after the last axis."""
    return Moves.of(
        Move(Kind.SEND, channel, first, NOWHERE, frame.blocks, False, frame.joined_to(rank))
        for channel, first in _of_channels(frame)
    )


def _of_channels(frame: Frame) -> list[tuple[int, int]]:
    """Return each channel and the first chunk of its share; the programs of all ranks use the same channels."""
    return [(channel, bases_of(frame).output + channel * frame.blocks) for channel in range(frame.channels)]


def _has_it(frame: Frame, axis: int, coordinates: tuple[int, ...]) -> bool:
    """Return whether the line along `axis` contains a rank that already has the root's data."""
    return coordinates[:axis] == frame.coordinates_of(frame.root)[:axis]


def _opening(frame: Frame, rank: int, coordinates: tuple[int, ...], *, copies: bool) -> Moves:
    """Return the initial local copies: the rank's own blocks that no pattern carries from INPUT to OUTPUT."""
    bases = bases_of(frame)
    block = sum(at * frame.width_of(axis) for axis, at in enumerate(coordinates))
    starts = {
        Collective.ALL_GATHER: (bases.input, 1, bases.output + block, frame.ranks),
        # With one rank there is no phase that would carry these blocks.
        Collective.REDUCE_SCATTER: (bases.input, 1, bases.output, 1) if copies else None,
        Collective.ALL_TO_ALL: (bases.input, 1, bases.output, 1) if copies else None,
    }.get(frame.collective)
    if starts is None:
        return Moves.of(())
    src, src_step, dst, dst_step = starts
    return Moves.of(
        Move(Kind.COPY, channel, src + channel * src_step, dst + channel * dst_step, 1, False, (rank,))
        for channel in range(frame.channels)
    )


def _places_of(frame: Frame, phase: Phase, index: int, *, is_final: bool) -> _Places:
    bases, is_first = bases_of(frame), index == 0
    if phase.pattern.effect is Effect.ALL_REDUCE:
        # Write the user's buffer last, so that it stays intact if the ranks turn out to disagree.
        aside, whole = bases.scratch + 2 * index * frame.blocks * frame.channels, frame.blocks * frame.channels
        return _Places(
            before=bases.output if is_first else aside - whole,
            after=aside,
            finished=bases.output if is_final else aside + whole,
        )
    if frame.collective is Collective.REDUCE_SCATTER:
        return _Places(
            before=bases.input if is_first else bases.scratch,
            after=bases.scratch,
            finished=bases.output if is_final else None,
            scattered=is_first,
        )
    if frame.collective is Collective.ALL_TO_ALL:
        return _Places(before=bases.input, after=bases.output)
    return _Places(before=bases.output, after=bases.output)


def _phase(frame: Frame, phase: Phase, rank: int, places: _Places, *, completes: bool) -> Moves:
    axis, size = phase.axis, frame.grid[phase.axis]
    coordinates, line = frame.coordinates_of(rank), frame.line_of(rank, axis)
    at, first, width, blocks, cuts = coordinates[axis], 0, 1, frame.blocks, size
    if phase.pattern.effect is Effect.BROADCAST:
        # The pattern's coordinate 0 is the root.
        turn = frame.coordinates_of(frame.root)[axis]
        at, blocks, cuts = (at - turn) % size, 1, 1
        line = np.roll(line, -turn) if turn else line
    elif phase.pattern.effect is Effect.ALL_REDUCE:
        width, cuts = blocks, 1
    elif phase.pattern.effect is not Effect.ALL_TO_ALL:
        width = frame.width_of(axis)
        first = sum(coordinates[earlier] * frame.width_of(earlier) for earlier in range(axis))
    program = phase.pattern.program(size, at)
    parts = np.maximum(program.src, program.dst)
    breaks = breaks_of(frame)[:blocks] if places.scattered else np.zeros(blocks, np.bool_)
    starts, spans, first_run, runs = _runs(breaks, first, width, cuts)

    channels = frame.channels
    repeats = runs[parts] * channels
    row = np.repeat(np.arange(len(program)), repeats)
    within = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    run, channel = first_run[parts[row]] + within // channels, within % channels
    block = starts[run] + channel * blocks
    written = _written_before(program, parts)[row]
    src = np.where(written, places.after, places.before) + block
    dst = places.after + block
    if places.finished is not None:
        whole = phase.pattern.effect is Effect.ALL_REDUCE
        completed = program.last[row] if whole else parts[row] == at
        dst = np.where(completed, places.finished + (block if whole else channel), dst)
    rows = program.take(row)
    wire = frame.wire_of(axis)
    sends = rows.kind == Kind.SEND
    # A finished chunk keeps the values that its peers decode. The gather overwrites an unfinished chunk.
    rounds = sends if wire and phase.pattern.effect is Effect.ALL_GATHER else np.zeros(len(sends), np.bool_)
    return Moves(
        kind=rows.kind,
        channel=channel.astype(np.uint16),
        src=np.where(rows.src == NOWHERE, NOWHERE, src).astype(np.int32),
        dst=np.where(rounds, src, np.where(rows.dst == NOWHERE, NOWHERE, dst)).astype(np.int32),
        span=spans[run].astype(np.int32),
        last=rows.last & completes,
        peer_start=rows.peer_start,
        peers=line[rows.peers],
        wire=np.where((rows.kind == Kind.COPY) & (rows.src != NOWHERE), 0, wire).astype(np.uint8),
    )


def _written_before(program: Moves, parts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return, for every move, whether an earlier move has written its part: shape (moves,)."""
    first_write = np.full(int(parts.max(initial=0)) + 1, len(program))
    writes = np.flatnonzero(program.dst != NOWHERE)
    np.minimum.at(first_write, parts[writes], writes)
    return np.arange(len(program)) > first_write[parts]


def _runs(
    breaks: NDArray[np.bool_], first: int, width: int, parts: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Cut `parts` parts of `width` blocks, starting at block `first`, into contiguous runs.

    Returns:
        The first block and the number of blocks of every run, then the first run and the number of runs of every part.
    """
    cut = breaks[first : first + parts * width].copy()
    cut[::width] = True
    starts = np.flatnonzero(cut)
    spans = np.diff(starts, append=parts * width)
    runs = cut.reshape(parts, width).sum(axis=1)
    return starts + first, spans, np.cumsum(runs) - runs, runs
