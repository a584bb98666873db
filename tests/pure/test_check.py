"""`check` (the rule of composition) and the proof of all moves accept correct schedules and reject wrong ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import process_time

import numpy as np
import pytest
from tests.support import mutations
from tests.support.schedules import GRIDS, all_moves, every_schedule, frame_on

from multiring._collectives import TABLE, build, direct, ring
from multiring._schedule import (
    Accumulation,
    Collective,
    Effect,
    Frame,
    Kind,
    Move,
    Moves,
    Pattern,
    Phase,
    Schedule,
    Wire,
    check,
    check_moves,
)
from multiring.errors import ScheduleError


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_rule_and_the_proof_of_all_moves_accept_every_schedule(grid: tuple[int, ...]) -> None:
    for schedule in every_schedule(grid):
        check(schedule)
        check_moves(schedule, all_moves(schedule))


@pytest.mark.parametrize("algorithm", ["direct", "ring", "direct_ring"])
def test_a_thousand_ranks_take_a_moment(algorithm: str) -> None:
    started = process_time()
    schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, (32, 32)))
    check(schedule)
    schedule.moves_of(1023)
    # 2 s on one core are promised. The test asserts no speed, only that the time is not quadratic in the number of
    # ranks, whatever else the machine does.
    assert process_time() - started < 60


def test_nothing_grows_with_all_moves_of_a_large_schedule() -> None:
    schedule = build("direct_ring", frame_on(Collective.ALL_REDUCE, (6, 24, 190)))
    assert schedule.ranks == 27_360
    check_free = schedule.moves_of(12_345)
    assert len(check_free) == (5 + 1 + 1 + 5) + 4 * 23 + 4 * 189


# --- composition: the proof of all moves rejects everything that the rule rejects ---


def _both_refuse(schedule: Schedule, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        check(schedule)
    with pytest.raises(ScheduleError):
        check_moves(schedule, all_moves(schedule))


def test_phases_out_of_order_are_refused() -> None:
    good = build("direct", frame_on(Collective.ALL_REDUCE, (2, 3)))
    scatter1, scatter2, gather2, gather1 = good.phases
    for phases in (
        (scatter2, scatter1, gather2, gather1),
        (scatter1, scatter2, gather1, gather2),
        (scatter1, scatter2, gather2),
        (scatter1, gather2, gather1),
        (scatter1, scatter2),
        (scatter1, scatter1, scatter2, gather2, gather1),
        (),
    ):
        _both_refuse(replace(good, phases=phases), "do not compose")


def test_an_exchange_over_several_axes_is_refused() -> None:
    schedule = build("direct", frame_on(Collective.ALL_TO_ALL, (6,)))
    on_grid = replace(schedule, frame=replace(schedule.frame, grid=(2, 3)))
    with pytest.raises(ScheduleError, match="do not compose"):
        check(on_grid)


def _shifted(program: Callable[[int, int], Moves], by: int, p: int, i: int) -> Moves:
    moves = program(p, i)
    shift = {
        name: np.where(parts < 0, parts, (parts + by) % p) for name, parts in (("src", moves.src), ("dst", moves.dst))
    }
    return replace(moves, src=shift["src"].astype(np.int32), dst=shift["dst"].astype(np.int32))


def test_a_scatter_and_a_gather_that_only_fit_each_other_are_refused_on_a_grid() -> None:
    # The sum of part i ends at coordinate i - 1 and is gathered from there. On one axis this is an all-reduce. With a
    # second axis, the part reduced in between is not complete.
    scatter = Pattern("scatter", Effect.REDUCE_SCATTER, partial(_shifted, ring.REDUCE_SCATTER.program, 1))
    gather = Pattern("gather", Effect.ALL_GATHER, partial(_shifted, ring.ALL_GATHER.program, 1))
    alone = Schedule(
        algorithm="shifted",
        frame=frame_on(Collective.ALL_REDUCE, (4,)),
        phases=(Phase(0, scatter), Phase(0, gather)),
    )
    check_moves(alone, all_moves(alone))
    with pytest.raises(ScheduleError):
        check(alone)
    phases = tuple(Phase(axis, scatter) for axis in (0, 1)) + tuple(Phase(axis, gather) for axis in (1, 0))
    _both_refuse(replace(alone, frame=frame_on(Collective.ALL_REDUCE, (4, 4)), phases=phases), "ends with")


def test_a_pattern_that_names_a_coordinate_beyond_its_line_is_refused() -> None:
    def program(p: int, i: int) -> Moves:
        return Moves.of([Move(Kind.SEND, 0, i, -1, 1, False, (p,))])

    good = build("direct", frame_on(Collective.ALL_REDUCE, (2,)))
    beyond = (Phase(0, Pattern("beyond", Effect.REDUCE_SCATTER, program)), good.phases[1])
    with pytest.raises(ScheduleError, match=r"beyond, coordinate 0 of 2, move 0: .* no such peer"):
        check(replace(good, phases=beyond))


def _eager_scatter(p: int, i: int) -> Moves:
    """Return `direct`'s moves plus an exchange of finished parts, each offered to the next coordinate."""
    moves = direct.REDUCE_SCATTER.program(p, i)
    offer = Move(Kind.SEND, 0, i, -1, 1, False, ((i + 1) % p,))
    take = Move(Kind.COPY, 0, -1, (i - 1) % p, 1, False, ((i - 1) % p,))
    return Moves.of([*moves.rows(), offer, take])


def test_a_part_that_is_still_read_when_the_next_axis_begins_is_refused() -> None:
    eager = Pattern("eager", Effect.REDUCE_SCATTER, _eager_scatter)
    phases = (Phase(0, eager), Phase(1, eager), Phase(1, direct.ALL_GATHER), Phase(0, direct.ALL_GATHER))
    on_grid = Schedule(algorithm="eager", frame=frame_on(Collective.ALL_REDUCE, (3, 3)), phases=phases)
    _both_refuse(on_grid, "may still be reading")


# --- accumulation ---


def test_a_ring_rounds_too_often_for_wide_accumulation() -> None:
    for grid in ((3,), (2, 3)):
        schedule = build("ring", frame_on(Collective.ALL_REDUCE, grid))
        _both_refuse(replace(schedule, accumulation=Accumulation.WIDE), "rounded 2 times")


def test_two_axes_round_too_often_for_a_single_accumulation() -> None:
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (2, 3)))
    _both_refuse(replace(schedule, accumulation=Accumulation.ONCE), "not accumulated once")
    check(build("direct", frame_on(Collective.ALL_REDUCE, (6,)), Accumulation.ONCE))


# --- the form of moves, one by one ---

SEND_0_TO_1 = Move(Kind.SEND, 0, 0, -1, 1, False, (1,))
REDUCE_0_FROM_1 = Move(Kind.REDUCE, 0, 0, 0, 1, True, (0, 1))
TWO = frame_on(Collective.ALL_REDUCE, (2,))


@pytest.mark.parametrize(
    ("move", "match"),
    [
        (SEND_0_TO_1._replace(peers=(2,)), "there are 2 ranks"),
        (SEND_0_TO_1._replace(peers=(-1,)), "there are 2 ranks"),
        (SEND_0_TO_1._replace(channel=1), "there are 1 channels"),
        (SEND_0_TO_1._replace(peers=(0,)), "other ranks as peers"),
        (SEND_0_TO_1._replace(peers=()), "other ranks as peers"),
        (SEND_0_TO_1._replace(dst=1), "a SEND has a dst only to keep what it codes"),
        (SEND_0_TO_1._replace(dst=0), "a SEND has a dst only to keep what it codes"),
        (SEND_0_TO_1._replace(dst=1, wire=Wire.BF16), "a SEND has a dst only to keep what it codes"),
        (Move(Kind.COPY, 0, 0, 1, 1, False, (0,), Wire.BF16), "nothing travels within a rank"),
        (SEND_0_TO_1._replace(src=-1), "other ranks as peers"),
        (SEND_0_TO_1._replace(last=True), "only a REDUCE"),
        (Move(Kind.COPY, 0, -1, 0, 1, False, (1, 1)), "a COPY has one peer"),
        (Move(Kind.COPY, 0, 0, 1, 1, False, (1,)), "a COPY has one peer"),
        (Move(Kind.COPY, 0, -1, 1, 1, False, (0,)), "a COPY has one peer"),
        (Move(Kind.COPY, 0, 0, 0, 1, False, (0,)), "onto themselves"),
        (Move(Kind.COPY, 0, 0, 1, 2, False, (0,)), "not contiguous"),
        (REDUCE_0_FROM_1._replace(peers=(0,)), "a REDUCE has two peers"),
        (REDUCE_0_FROM_1._replace(peers=(0, 0, 1)), "a REDUCE has two peers"),
        (REDUCE_0_FROM_1._replace(src=-1), "a REDUCE has two peers"),
        (REDUCE_0_FROM_1._replace(dst=-1), "a REDUCE has two peers"),
        (REDUCE_0_FROM_1._replace(peers=(1, 1)), "a REDUCE has two peers"),
        (SEND_0_TO_1._replace(src=4), "not contiguous"),
        (SEND_0_TO_1._replace(src=-2), "not contiguous"),
        (SEND_0_TO_1._replace(span=0), "not contiguous"),
        (SEND_0_TO_1._replace(span=3), "not contiguous"),
    ],
)
def test_a_malformed_move_is_named(move: Move, match: str) -> None:
    schedule = build("direct", TWO)
    with pytest.raises(ScheduleError, match=match):
        check_moves(schedule, {0: Moves.of([move]), 1: Moves.of([])})


def test_overlapping_src_and_dst_are_refused() -> None:
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (3,)))
    programs = {0: Moves.of([Move(Kind.COPY, 0, 0, 1, 2, False, (0,))]), 1: Moves.of([]), 2: Moves.of([])}
    with pytest.raises(ScheduleError, match="overlap"):
        check_moves(schedule, programs)


def test_spans_across_a_gap_in_memory_are_refused() -> None:
    # In shuffled order, neighbouring blocks are not adjacent in the user's buffer. INPUT and OUTPUT are never adjacent.
    schedule = build("direct", frame_on(Collective.ALL_GATHER, (5,), shuffled=True))
    programs = all_moves(schedule)
    programs[0] = Moves.of([*programs[0].rows(), Move(Kind.SEND, 0, 0, -1, 2, False, (1,))])
    with pytest.raises(ScheduleError, match="not contiguous"):
        check_moves(schedule, programs)


def test_every_rank_needs_a_program() -> None:
    schedule = build("direct", TWO)
    with pytest.raises(ScheduleError, match=r"ranks \[0\]: want 0 to 1"):
        check_moves(schedule, {0: schedule.moves_of(0)})


# --- programs that are wrong only together ---


def _refused(frame: Frame, programs: list[list[Move]], match: str) -> None:
    schedule = build("direct", frame)
    with pytest.raises(ScheduleError, match=match):
        check_moves(schedule, {rank: Moves.of(moves) for rank, moves in enumerate(programs)})


def test_a_cycle_of_waiting_ranks_is_a_deadlock() -> None:
    take = Move(Kind.COPY, 0, -1, 0, 1, False, (1,))
    give = Move(Kind.SEND, 0, 1, -1, 1, False, (1,))
    mirror = [take._replace(dst=1, peers=(0,)), give._replace(src=0, peers=(0,))]
    _refused(TWO, [[take, give], mirror], "deadlock: rank 0 waits for ever in move 0")


def test_a_message_nobody_takes_is_named() -> None:
    _refused(TWO, [[SEND_0_TO_1], []], "rank 0 sends 1 messages to rank 1 on channel 0, which takes 0")


def test_a_message_of_another_size_is_named() -> None:
    both = [Move(Kind.COPY, 0, -1, 0, 2, False, (0,))]
    _refused(TWO, [[SEND_0_TO_1], both], "rank 0 sends 1 chunks, but rank 1 expects 2")


def test_reading_what_nobody_wrote_is_named() -> None:
    frame = frame_on(Collective.BROADCAST, (2,))
    _refused(frame, [[SEND_0_TO_1], [Move(Kind.COPY, 0, -1, 0, 1, False, (0,))]], "nothing is in chunk 0")
    scatter = frame_on(Collective.REDUCE_SCATTER, (2,))
    own_scratch = Move(Kind.REDUCE, 0, 3, 2, 1, True, (0, 1))
    _refused(scatter, [[own_scratch], [Move(Kind.SEND, 0, 0, -1, 1, False, (0,))]], "the rank's own operand is empty")


def test_writing_the_input_is_named() -> None:
    frame = frame_on(Collective.REDUCE_SCATTER, (2,))
    programs = [[Move(Kind.SEND, 0, 1, -1, 1, False, (1,))], [Move(Kind.REDUCE, 0, 1, 1, 1, True, (0, 1))]]
    _refused(frame, programs, "INPUT, which nobody may write")


def test_overwriting_what_a_slow_reader_may_still_read_is_named() -> None:
    # Rank 0 offers chunk 0 and at once receives into it, so rank 1 may read the new bytes.
    frame = frame_on(Collective.ALL_REDUCE, (2,))
    first = [SEND_0_TO_1, Move(Kind.REDUCE, 0, 0, 0, 1, True, (0, 1))]
    second = [Move(Kind.SEND, 0, 0, -1, 1, False, (0,)), Move(Kind.REDUCE, 0, 0, 0, 1, True, (0, 1))]
    _refused(frame, [first, second], "overwrites chunk 0, which rank 0 may still be reading in its move 1")


def test_a_reduce_may_begin_to_write_before_its_last_operand_is_in() -> None:
    # Rank 2's message proves that rank 1 has read chunk 0, but rank 0 may add rank 1's operand before it arrives.
    frame = frame_on(Collective.ALL_REDUCE, (3,))
    first = [SEND_0_TO_1, Move(Kind.REDUCE, 0, 0, 0, 1, True, (0, 1, 2))]
    second = [
        Move(Kind.SEND, 0, 0, -1, 1, False, (0,)),
        Move(Kind.REDUCE, 0, 0, 0, 1, False, (0, 1)),
        Move(Kind.SEND, 0, 1, -1, 1, False, (2,)),
    ]
    third = [Move(Kind.REDUCE, 0, 1, 1, 1, False, (1, 2)), Move(Kind.SEND, 0, 0, -1, 1, False, (0,))]
    _refused(frame, [first, second, third], "overwrites chunk 0")


# --- mutations: every single change of every move is detected ---


SMALL = [(2,), (3,), (4,), (2, 2), (2, 3)]


@pytest.mark.parametrize("grid", SMALL, ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_every_single_mutation_of_a_small_schedule_is_caught(
    collective: Collective, algorithm: str, grid: tuple[int, ...]
) -> None:
    # By symmetry, the first and the last rank suffice; one of them may be the root. Up to three ranks, test every
    # mutant. Of four and six ranks, test every second and every fifth; benchmarks/evidence/schedules/main.py tests all.
    schedule = build(algorithm, frame_on(collective, grid))
    assert mutations.of_small(schedule, {4: 2, 6: 5}.get(schedule.ranks, 1)) == []


@pytest.mark.parametrize("grid", [(17,), (4, 4), (2, 3, 2)], ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_random_mutations_of_larger_schedules_are_caught(
    collective: Collective, algorithm: str, grid: tuple[int, ...]
) -> None:
    schedule = build(algorithm, frame_on(collective, grid, shuffled=True, shares=(2, 1)))
    assert mutations.of_large(schedule, np.random.default_rng(len(grid)), 2) == []


@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_the_rule_catches_every_single_mutation_of_every_pattern(collective: Collective, algorithm: str) -> None:
    # Every second mutant of the first coordinate, and the others of the last. The evidence program tests all of both.
    schedule = build(algorithm, frame_on(collective, (3,)))
    assert mutations.of_patterns(schedule, 2) == []


# --- moves out of order: an accepted program is right however the ranks race ---


@pytest.mark.parametrize("grid", [(3,), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "direct_ring"])
def test_moves_in_another_order_are_refused_or_right_in_every_race(algorithm: str, grid: tuple[int, ...]) -> None:
    schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, grid))
    rounds = {3: 60, 4: 40, 6: 30}[schedule.ranks]  # the evidence program runs thousands
    outcomes = mutations.races(schedule, np.random.default_rng(schedule.ranks), rounds)
    assert outcomes["accepted and wrong"] == 0
    assert min(outcomes[each] for each in ("accepted", "refused", "caught in the act")) > 0
