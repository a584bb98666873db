"""A program's lowering does the same as its moves; the core rejects programs that have no such lowering."""

from dataclasses import replace

import numpy as np
import pytest

from multiring._collectives import build
from multiring._native import NOTE_BYTES, Lowering, Program
from multiring._runtime.group.compile import ProgramExecution, compile_moves
from multiring._schedule import Collective, Frame, Kind, Moves, Schedule
from multiring.errors import ArgumentError

ELEMENTS = 1000
SHARES = ((1,), (2, 1, 3))


def schedule_of(algorithm: str, *grid: int, shares: tuple[int, ...] = (1,)) -> Schedule:
    ranks = int(np.prod(grid))
    order = tuple(range(ranks))
    return build(algorithm, Frame(collective=Collective.ALL_REDUCE, grid=grid, order=order, shares=shares))


def program(schedule: Schedule, lowering: Lowering, moves: Moves | None = None, elements: int = ELEMENTS) -> Program:
    return compile_moves(
        schedule.moves_of(0) if moves is None else moves,
        schedule.extents_of(0, elements),
        "float32",
        "sum",
        np.arange(schedule.ranks, dtype=np.int32),
        ProgramExecution(lowering),
    )


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("elements", [0, 1, 40, ELEMENTS])
@pytest.mark.parametrize(
    ("algorithm", "grid", "lowering"),
    [
        ("direct", (4,), Lowering.SLICE),
        ("exchange", (4,), Lowering.EXCHANGE),
        ("exchange", (4,), Lowering.NOTES),
        ("exchange", (2, 3, 2), Lowering.NOTES),
        ("direct", (1,), Lowering.SLICE),
    ],
)
def test_what_has_its_lowerings_form(
    algorithm: str, grid: tuple[int, ...], lowering: Lowering, elements: int, shares: tuple[int, ...]
) -> None:
    assert program(schedule_of(algorithm, *grid, shares=shares), lowering, elements=elements) is not None


@pytest.mark.parametrize(
    ("algorithm", "grid", "lowering", "match"),
    [
        ("ring", (3,), Lowering.SLICE, "slice: it does not combine all contributions"),
        ("direct", (2, 2), Lowering.SLICE, "slice: it does not combine all contributions"),
        ("exchange", (3,), Lowering.SLICE, "slice: it uses scratch memory"),
        ("exchange", (2, 2), Lowering.EXCHANGE, "exchange: it does not combine all contributions"),
        ("direct", (3,), Lowering.EXCHANGE, "exchange: it does not use a copy of a contribution"),
        ("ring", (3,), Lowering.NOTES, "notes: it writes the buffer before all ranks have contributed"),
        ("direct", (3,), Lowering.NOTES, "notes: it writes the buffer before all ranks have contributed"),
    ],
)
def test_what_has_another_form_is_refused(
    algorithm: str, grid: tuple[int, ...], lowering: Lowering, match: str
) -> None:
    for shares in SHARES:
        with pytest.raises(ArgumentError, match=f"to be run as {match}"):
            program(schedule_of(algorithm, *grid, shares=shares), lowering)


def test_a_note_holds_so_much() -> None:
    schedule = schedule_of("exchange", 3)
    assert program(schedule, Lowering.NOTES, elements=NOTE_BYTES // 4) is not None
    with pytest.raises(ArgumentError, match="it sends more than a note holds"):
        program(schedule, Lowering.NOTES, elements=NOTE_BYTES // 4 + 1)


def without(moves: Moves, row: int) -> Moves:
    return moves.take(np.delete(np.arange(len(moves)), row))


@pytest.mark.parametrize(
    ("algorithm", "lowering"),
    [("direct", Lowering.SLICE), ("exchange", Lowering.EXCHANGE)],
)
def test_one_move_less_is_refused(algorithm: str, lowering: Lowering) -> None:
    schedule = schedule_of(algorithm, 3, shares=(1, 1))
    moves = schedule.moves_of(0)
    for row in np.flatnonzero(moves.kind != Kind.SEND):
        with pytest.raises(ArgumentError, match=r"the moves do not write each byte once|does not use a copy of"):
            program(schedule, lowering, without(moves, int(row)))


def test_reductions_of_one_lowering_are_alike() -> None:
    schedule = schedule_of("exchange", 3, shares=(1, 1))
    moves = schedule.moves_of(0)
    last = int(moves.peer_start[-2])
    peers = moves.peers.copy()
    peers[last:] = peers[last:][::-1]
    with pytest.raises(ArgumentError, match="it combines other ranks, or in another order, than the first"):
        program(schedule, Lowering.EXCHANGE, replace(moves, peers=peers))
    backwards = np.arange(len(moves))
    backwards[-2:] = backwards[-2:][::-1]
    with pytest.raises(ArgumentError, match="it does not write in ascending order of memory"):
        program(schedule, Lowering.EXCHANGE, moves.take(backwards))


def test_only_so_many_messages_of_a_line_are_noted() -> None:
    schedule = schedule_of("exchange", 3)
    moves = schedule.moves_of(0)
    send = int(np.flatnonzero(moves.kind == Kind.SEND)[0])
    for copies, is_refused in ((63, False), (64, True)):
        more = moves.take(np.concatenate([np.arange(send + 1), np.full(copies, send), np.arange(send + 1, len(moves))]))
        if is_refused:
            with pytest.raises(ArgumentError, match="it is one message too many to a rank"):
                program(schedule, Lowering.NOTES, more)
        else:
            assert program(schedule, Lowering.NOTES, more) is not None


def test_what_is_cut_or_coded_is_not_lowered() -> None:
    schedule = schedule_of("direct", 3)
    extents = schedule.extents_of(0, ELEMENTS)
    ranks = np.arange(3, dtype=np.int32)
    with pytest.raises(ArgumentError, match="its buffer is cut into segments"):
        compile_moves(schedule.moves_of(0), extents, "float32", "sum", ranks, ProgramExecution(Lowering.SLICE, 2))
    coded = replace(schedule.moves_of(0), wire=np.ones(len(schedule.moves_of(0)), np.uint8))
    with pytest.raises(ArgumentError, match="it uses a lossy wire"):
        program(schedule, Lowering.SLICE, coded)
