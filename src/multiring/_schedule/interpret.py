"""Run a schedule move by move on numpy arrays of all ranks.

This interpreter is the reference for the native executor.

It is slow and simple on purpose. A receiver reads its sender's memory as late as the executor may, at the time when the
receiver takes the message. Scratch memory starts as noise.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.arithmetic import combine
from multiring._schedule.kinds import Accumulation, Collective, Kind, Space, Wire
from multiring._schedule.layout import Counts, Extents, Splits
from multiring._schedule.model import Schedule
from multiring._schedule.moves import NOWHERE, Move, Moves
from multiring._schedule.wire import decode, encode, encoded_bytes
from multiring.errors import ScheduleError

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Interpretation:
    """The results of the ranks, and the moves that each rank executed, in order."""

    outputs: tuple[Array, ...]
    log: tuple[tuple[Move, ...], ...]


def interpret(
    schedule: Schedule, arrays: Sequence[Array], op: str = "sum", counts: Sequence[Counts] | None = None
) -> Interpretation:
    """Run `schedule` on copies of `arrays` and return the results.

    Args:
        schedule: the schedule; it should have passed `check`.
        arrays: one one-dimensional array per rank: the rank's input, or its buffer if the collective works in place.
        op: the operation; one of `OPS`.
        counts: one entry per rank, as for `Schedule.extents_of`; by default derived from the arrays' sizes, with
            equal blocks.

    Raises:
        ArgumentError: `op` is not defined for the arrays' type.
        ScheduleError: `arrays` or `counts` do not fit the schedule, or the ranks deadlock.
    """
    if len(arrays) != schedule.ranks or (counts is not None and len(counts) != schedule.ranks):
        raise ScheduleError(
            f"{len(arrays)} arrays, counts {counts} for {schedule.ranks} ranks: want one array and one count per rank"
        )
    forms = sorted({(array.dtype.name, array.ndim) for array in arrays})
    if len(forms) > 1 or forms[0][1] != 1:
        raise ScheduleError(f"arrays of types and dimensions {forms}: want arrays of one type, with one dimension")
    every = _default_counts(schedule, [array.size for array in arrays]) if counts is None else counts
    ranks = [
        _Rank(schedule.moves_of(rank), schedule.extents_of(rank, every[rank]), array)
        for rank, array in enumerate(arrays)
    ]
    if schedule.frame.is_coded and (forms[0][0] != "float32" or op not in {"sum", "average"}):
        raise ScheduleError(f"{op} of {forms[0][0]} over {schedule}: want a sum or an average of float32")
    _run(ranks, op, schedule.accumulation)
    return Interpretation(tuple(rank.memory[Space.OUTPUT] for rank in ranks), tuple(tuple(rank.log) for rank in ranks))


def _default_counts(schedule: Schedule, sizes: list[int]) -> list[Counts]:
    if schedule.collective in {Collective.ALL_REDUCE, Collective.BROADCAST}:
        return list(sizes)
    if schedule.collective is Collective.ALL_GATHER:
        return [sizes] * schedule.ranks
    blocks = [size // schedule.ranks for size in sizes]
    if schedule.collective is Collective.REDUCE_SCATTER:
        return [[block] * schedule.ranks for block in blocks]
    return [Splits(send=[block] * schedule.ranks, receive=blocks) for block in blocks]


class _Rank:
    """One rank's memory, its log of finished moves, and its remaining moves."""

    def __init__(self, moves: Moves, extents: Extents, array: Array) -> None:
        self.extents = extents
        sizes = {space: int(extents.count[extents.space == space].sum()) for space in Space}
        is_in_place = not (extents.space == Space.INPUT).any()
        if array.size != sizes[Space.OUTPUT if is_in_place else Space.INPUT]:
            raise ScheduleError(f"an array of {array.size} elements: its chunks have {sizes}")
        noise = {space: np.full(size * array.itemsize, 0xA5, np.uint8) for space, size in sizes.items()}
        self.memory = {space: raw.view(array.dtype) for space, raw in noise.items()}
        self.memory[Space.OUTPUT if is_in_place else Space.INPUT] = array.copy()
        self.todo = deque(moves.rows())
        self.log: list[Move] = []

    def view(self, first: int, span: int) -> Array:
        """Return the memory of `span` chunks, starting at chunk `first`."""
        start = int(self.extents.offset[first])
        stop = start + int(self.extents.count[first : first + span].sum())
        return self.memory[Space(self.extents.space[first])][start:stop]


def _run(ranks: list[_Rank], op: str, accumulation: Accumulation) -> None:
    """Execute the moves of all ranks in turns until every rank is done."""
    offers: dict[tuple[int, int, int], deque[Array]] = {}
    has_progress = True
    while has_progress:
        has_progress = False
        for me, rank in enumerate(ranks):
            while rank.todo and _execute(ranks, me, rank.todo[0], offers, (op, accumulation)):
                rank.log.append(rank.todo.popleft())
                has_progress = True
    stuck = [me for me, rank in enumerate(ranks) if rank.todo]
    if stuck:
        raise ScheduleError(f"deadlock: ranks {stuck} wait for ever, rank {stuck[0]} in {ranks[stuck[0]].todo[0]}")


def _execute(
    ranks: list[_Rank],
    me: int,
    move: Move,
    offers: dict[tuple[int, int, int], deque[Array]],
    arithmetic: tuple[str, Accumulation],
) -> bool:
    """Execute one move. If one of its messages has not been sent, change nothing and return False."""
    rank = ranks[me]
    if move.kind is Kind.SEND:
        offered = rank.view(move.src, move.span)
        if move.wire:
            source, offered = offered, encode(move.wire, offered)
            if move.dst != NOWHERE:
                source[...] = decode(move.wire, offered, source.size)
        for peer in move.peers:
            offers.setdefault((me, peer, move.channel), deque()).append(offered)
        return True
    routes = [(peer, me, move.channel) for peer in move.peers]
    if not all(route[0] == me or offers.get(route) for route in routes):
        return False
    target = rank.view(move.dst, move.span)
    operands = [
        rank.view(move.src, move.span) if route[0] == me else _arrived(offers[route].popleft(), move.wire, target.size)
        for route in routes
    ]
    if any(operand.size != target.size for operand in operands):
        raise ScheduleError(f"rank {me}: {move}: {[o.size for o in operands]} elements do not fit {target.size}")
    target[...] = operands[0] if move.kind is Kind.COPY else combine(operands, *arithmetic, len(ranks), last=move.last)
    return True


def _arrived(message: Array, wire: Wire, elements: int) -> Array:
    """Return a message's `elements` elements, decoded."""
    if not wire:
        return message
    if message.size != encoded_bytes(wire, elements):
        raise ScheduleError(f"{message.size} bytes do not hold {elements} elements as {wire.name.lower()}")
    return decode(wire, message, elements)
