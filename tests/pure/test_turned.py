"""Lines of ranks with rotated copies of one program: the proof by one rank agrees with the proof of all moves."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import process_time

import numpy as np
import pytest
from tests.support.mutations import mutants_of
from tests.support.schedules import all_moves, frame_on

from multiring._collectives import TABLE, build
from multiring._schedule import Collective, Frame, Kind, Move, Moves, Pattern, Phase, Schedule, Wire, check
from multiring._schedule.layout import layout_of
from multiring._schedule.promise import Promise, promise_of, scattered_promise
from multiring._schedule.prove import prove
from multiring._schedule.turn import Likeness, Turn
from multiring._schedule.turned import prove_turned
from multiring.errors import ScheduleError

TURNING = [entry for entry in TABLE if entry[0] is not Collective.BROADCAST]


def _turn_of(schedule: Schedule) -> Turn:
    of = Turn.of_ranks if schedule.algorithm == "exchange" else Turn.of_chunks
    return of(schedule.ranks, layout_of(schedule.frame))


def _turned(moves: Moves, by: int, turn: Turn, *, is_fixed: bool) -> Moves:
    """Return the moves rotated by `by` ranks. With `is_fixed`, REDUCEs take their operands in rank order."""
    peers = ((moves.peers + by) % turn.ranks).astype(np.int32)
    rows = []
    for row in replace(
        moves,
        src=turn.chunks(moves.src, by).astype(np.int32),
        dst=turn.chunks(moves.dst, by).astype(np.int32),
        peers=peers,
    ).rows():
        order = tuple(sorted(row.peers)) if row.kind is Kind.REDUCE and is_fixed else row.peers
        rows.append(row._replace(peers=order))
    return Moves.of(rows)


# --- assumptions of the proof about this library's own functions ---


@pytest.mark.parametrize("p", [2, 3, 4, 7])
@pytest.mark.parametrize(("collective", "algorithm"), TURNING, ids=lambda value: getattr(value, "value", value))
def test_expanding_a_turned_program_turns_its_moves(collective: Collective, algorithm: str, p: int) -> None:
    wires = (Wire.BF16,) if (collective, algorithm) == (Collective.ALL_REDUCE, "direct") else ()
    schedule = build(algorithm, replace(frame_on(collective, (p,)), wires=wires))
    likeness = Likeness(schedule.moves_of(0), _turn_of(schedule))
    assert [likeness.differs(schedule.moves_of(rank), rank) for rank in range(p)] == [None] * p


@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_expanding_any_turned_program_turns_its_moves(p: int, seed: int) -> None:
    # The programs are meaningless: `expand` renames moves without regard to their purpose.
    generator = np.random.default_rng(seed)
    rows = []
    for kind in generator.choice(list(Kind), 12).tolist():
        part, peers = int(generator.integers(p)), generator.permutation(p)[: generator.integers(1, p + 1)].tolist()
        rows.append(
            Move(Kind(kind), 0, part if kind != 1 else -1, -1 if kind == 0 else part, 1, kind == 2, tuple(peers))
        )
    first, parts = Moves.of(rows), Turn.of_parts(p, p)

    def program(size: int, at: int) -> Moves:
        return _turned(first, at, parts, is_fixed=False) if size == p else Moves.of([])

    for collective, algorithm in TURNING:
        good = build(algorithm, frame_on(collective, (p,)))
        if algorithm != "exchange":
            phases = tuple(replace(each, pattern=replace(each.pattern, program=program)) for each in good.phases)
            schedule = replace(good, phases=phases)
            likeness = Likeness(schedule.moves_of(0), _turn_of(schedule))
            assert [likeness.differs(schedule.moves_of(rank), rank) for rank in range(p)] == [None] * p


def _promises(p: int) -> list[tuple[Promise, Turn]]:
    plain = [promise_of(frame_on(each, (p,)), p) for each in Collective if each is not Collective.BROADCAST]
    promises = [(each, Turn.of_chunks(p, each.layout)) for each in [*plain, scattered_promise(p, Wire.NONE)]]
    return promises + [(each, Turn.of_ranks(p, each.layout)) for each in plain if each.stays]


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_promises_turn(p: int) -> None:
    def turned_mask(mask: int, by: int) -> int:
        return sum(1 << (rank + by) % p for rank in range(p) if mask >> rank & 1)

    for promise, turn in _promises(p):
        assert promise.turns
        homes_turn = bool((turn.length > 1).any())
        for rank in range(p):
            for chunk in range(len(promise.layout.space)):
                there, home = turn.chunk(chunk, rank), promise.home(0, chunk)
                block = home % p if not homes_turn else (home + rank) % p
                want = block + ((home // p + rank) % p * p if promise.pairs else 0)
                assert promise.home(rank, there) == want
                assert promise.start(rank, there) == turned_mask(promise.start(0, chunk), rank)
                assert promise.want(rank, there) == turned_mask(promise.want(0, chunk), rank)


# --- both proofs agree on rotated programs, right or wrong ---


def _accepts(proof: Callable[[], None]) -> bool:
    try:
        proof()
    except ScheduleError:
        return False
    return True


def _both(promise: Promise, first: Moves, turn: Turn, *, is_fixed: bool) -> tuple[bool, bool]:
    """Return the verdicts of the proof by one rank and of the proof of all moves, for ranks that rotate `first`."""
    programs = {rank: _turned(first, rank, turn, is_fixed=is_fixed) for rank in range(turn.ranks)}
    fixed = (first.kind == Kind.REDUCE) & is_fixed
    return (
        _accepts(lambda: prove_turned(promise, programs[0], fixed, turn)),
        _accepts(lambda: prove(promise, programs)),
    )


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize(("collective", "algorithm"), TURNING, ids=lambda value: getattr(value, "value", value))
def test_every_mutation_that_all_ranks_make_is_seen_by_one(collective: Collective, algorithm: str, p: int) -> None:
    wires = ((), (Wire.BF16,)) if (collective, algorithm) == (Collective.ALL_REDUCE, "direct") else ((),)
    for each in wires:
        schedule = build(algorithm, replace(frame_on(collective, (p,)), wires=each))
        promise, turn = promise_of(schedule.frame, p), _turn_of(schedule)
        is_fixed = "ring" not in algorithm or algorithm == "direct_ring"
        program = list(schedule.moves_of(0).rows())
        chunks = len(promise.layout.space)
        assert _both(promise, schedule.moves_of(0), turn, is_fixed=is_fixed) == (True, True)
        unequal, tried = [], 0
        for name, mutant in mutants_of(program, p, chunks):
            moves = Moves.of(mutant)
            if (moves.src >= chunks).any() or (moves.dst >= chunks).any() or (moves.span != program[0].span).any():
                continue  # cannot be rotated
            if not ((moves.peers >= 0) & (moves.peers < p)).all():
                continue
            tried += 1
            by_one, by_all = _both(promise, moves, turn, is_fixed=is_fixed)
            if by_one != by_all:
                unequal.append((name, by_one, by_all))
        assert unequal == []
        assert tried >= 10 * len(program)


def test_moves_in_any_order_are_proven_alike() -> None:
    # Orders with possible races (overwritten while read) or with waits for a later move.
    generator, verdicts = np.random.default_rng(7), []
    for collective, algorithm in TURNING:
        for p in (3, 4):
            schedule = build(algorithm, frame_on(collective, (p,)))
            promise, turn, program = (
                promise_of(schedule.frame, p),
                _turn_of(schedule),
                list(schedule.moves_of(0).rows()),
            )
            for _ in range(12):
                order = np.arange(len(program))
                at = generator.choice(len(program), 2)
                order[at] = order[at[::-1]]
                first = Moves.of([program[index] for index in order])
                verdicts.append(_both(promise, first, turn, is_fixed="direct" in algorithm or algorithm == "exchange"))
    assert all(by_one == by_all for by_one, by_all in verdicts)
    assert {by_all for _, by_all in verdicts} == {True, False}


# --- long lines ---


def _altered(program: Callable[[int, int], Moves], at: int, change: Callable[[list[Move]], list[Move]], p: int, i: int
             ) -> Moves:  # fmt: skip
    moves = program(p, i)
    return Moves.of(change(list(moves.rows()))) if i == at else moves


def _change(index: int, **fields: object) -> Callable[[list[Move]], list[Move]]:
    return lambda rows: [*rows[:index], rows[index]._replace(**fields), *rows[index + 1 :]]  # type: ignore[arg-type]


CHANGES = {
    "another part": _change(5, src=3),
    "another peer": _change(4, peers=(77,)),
    "not last": lambda rows: [row._replace(last=False) for row in rows],
    "one less": lambda rows: rows[:-1],
    "one twice": lambda rows: [rows[0], *rows],
    "two swapped": lambda rows: [rows[1], rows[0], *rows[2:]],
}


def _with(schedule: Schedule, phase: int, at: int, change: Callable[[list[Move]], list[Move]]) -> Schedule:
    pattern = schedule.phases[phase].pattern
    wrong = Pattern(pattern.name, pattern.effect, partial(_altered, pattern.program, at, change))
    phases = list(schedule.phases)
    phases[phase] = Phase(0, wrong)
    return replace(schedule, phases=tuple(phases))


@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_a_flat_line_of_a_thousand_ranks_takes_a_moment(collective: Collective, algorithm: str) -> None:
    started = process_time()
    check(build(algorithm, frame_on(collective, (1024,))))
    # 2 s on one core are promised; benchmarks/evidence/scale/main.py measures it. The test asserts only that the time
    # is not quadratic in the number of ranks, whatever else the machine does.
    assert process_time() - started < 60


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 1, 400])
def test_one_altered_move_of_many_ranks_is_refused(change: str, at: int) -> None:
    # 600 ranks exchange more messages than are proven one by one.
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (600,)))
    with pytest.raises(ScheduleError, match=r"coordinate|rank 0"):
        check(_with(schedule, 0, at, CHANGES[change]))


def test_what_a_drawn_rank_does_is_compared_and_what_others_do_is_not() -> None:
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (2048,)))
    drawn = (17, 1000, 2000)
    check(schedule, drawn)
    wrong = _with(schedule, 1, 1000, lambda rows: [rows[0], rows[2], rows[1], *rows[3:]])
    with pytest.raises(ScheduleError, match=r"direct_all_gather, coordinate 1000 of 2048, move 1: COPY"):
        check(wrong, drawn)
    check(wrong, (17, 999))  # `check` does not compare coordinate 1000


def test_on_a_grid_the_coordinates_of_drawn_ranks_are_compared() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (600, 3)))
    wrong = _with(schedule, 0, 599, CHANGES["one less"])
    check(wrong, (0, 601))
    with pytest.raises(ScheduleError, match="coordinate 599 of 600"):
        check(wrong, (0, 599 + 600))


def test_a_short_line_whose_ranks_do_not_turn_alike_is_proven_move_by_move() -> None:
    # Coordinate 1 gathers in another order, which is correct but no rotation.
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (5,)))
    other = _with(schedule, 1, 1, lambda rows: [rows[0], rows[2], rows[1], *rows[3:]])
    check(other)
    check(other, [0])
    long = build("direct", frame_on(Collective.ALL_REDUCE, (1024,)))
    with pytest.raises(ScheduleError, match="a line of 1024 ranks is too long to be proven message by message"):
        check(_with(long, 1, 1, lambda rows: [rows[0], rows[2], rows[1], *rows[3:]]))


def test_a_wrong_program_that_all_ranks_turn_is_refused_on_a_long_line() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (1024,)))
    scatter = schedule.phases[0].pattern

    def early(p: int, i: int) -> Moves:
        moves = scatter.program(p, i)
        return moves.take(np.array([1, 0, *range(2, len(moves))]))

    wrong = replace(schedule, phases=(Phase(0, replace(scatter, program=early)), schedule.phases[1]))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits for ever in move 0"):
        check(wrong)


def test_all_moves_agree_with_the_proof_by_one_rank() -> None:
    for collective, algorithm in TURNING:
        schedule = build(algorithm, frame_on(collective, (9,)))
        prove(promise_of(schedule.frame, 9), all_moves(schedule))
        check(schedule)


def test_a_frame_looks_up_what_its_order_says() -> None:
    frame = Frame(collective=Collective.ALL_REDUCE, grid=(2, 3), order=(5, 1, 2, 3, 4, 0))
    assert [frame.order[frame.position_of(rank)] for rank in range(6)] == list(range(6))
    assert hash(frame) == hash(replace(frame))
    assert frame == replace(frame)
