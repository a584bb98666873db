"""Wire types: the reference codecs, and the proofs, results and costs of schedules with coded axes."""

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tests.support.mutations import mutants_of
from tests.support.schedules import all_moves, frame_on

from multiring._collectives import build
from multiring._schedule import (
    FORMATS,
    NOWHERE,
    WIRES,
    Accumulation,
    Collective,
    Effect,
    Frame,
    Kind,
    Move,
    Moves,
    Schedule,
    Wire,
    check,
    check_moves,
    decoded,
    encoded_bytes,
    interpret,
    price,
    wire_of,
)
from multiring._schedule.promise import promise_of
from multiring._schedule.prove import prove
from multiring._schedule.wire import decode, encode
from multiring._topology import Link
from multiring.errors import ArgumentError, ScheduleError

Floats = NDArray[np.float32]
LOSSY = [Wire.FP16, Wire.BF16, Wire.INT8]
ANY_FLOATS = arrays(np.uint32, st.integers(0, 600)).map(lambda bits: bits.view(np.float32))
AWKWARD = np.array(
    [np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-40, 6e-8, 65504, 65519.9, 65520, 3.4028235e38, -1.5], np.float32
)


def _bits(array: Floats) -> list[int]:
    return [int(bits) for bits in array.view(np.uint32)]


# --- the codecs ---


@given(array=ANY_FLOATS)
def test_sixteen_bits_are_the_nearest_float(array: Floats) -> None:
    for wire, dtype in ((Wire.FP16, np.dtype(np.float16)), (Wire.BF16, np.dtype(ml_dtypes.bfloat16))):
        with np.errstate(all="ignore"):
            want = array.astype(dtype).astype(np.float32)
        want[np.isnan(want)] = np.nan
        assert _bits(decoded(wire, array)) == _bits(want)


@given(array=arrays(np.float32, st.integers(0, 600), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int8_is_off_by_half_a_step_of_its_block(array: Floats) -> None:
    got = decoded(Wire.INT8, array)
    for start in range(0, array.size, 256):
        block = array[start : start + 256].astype(np.float64)
        largest = np.abs(block).max()
        # A step is largest / 127, rounded down by at most 2^-16 of itself. Far below the smallest scale, all becomes 0.
        bound = largest / 254 * (1 + 2.0**-15) if largest >= 2.0**-119 else largest
        assert (np.abs(got[start : start + 256] - block) <= bound).all()


@pytest.mark.parametrize("wire", LOSSY)
@given(array=ANY_FLOATS)
def test_coding_twice_loses_nothing_more(wire: Wire, array: Floats) -> None:
    once = encode(wire, array)
    assert once.size == encoded_bytes(wire, array.size)
    arrived = decode(wire, once, array.size)
    again = encode(wire, arrived)
    assert _bits(decode(wire, again, array.size)) == _bits(arrived)
    finite = np.isfinite(array).all()
    assert not finite or wire is not Wire.INT8 or again.tobytes() == once.tobytes()


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_vanishes(wire: Wire, bad: float) -> None:
    array = np.ones(600, np.float32)
    array[300] = bad
    got = decoded(wire, array)
    assert not np.isfinite(got[300])
    assert np.isfinite(got[:256]).all()
    assert np.isfinite(got[512:]).all()
    if wire is Wire.INT8:
        assert np.isnan(got[256:512]).all()
    else:
        assert got[300] == bad or math.isnan(bad)


def test_the_largest_floats_fit_and_the_smallest_are_zero() -> None:
    top = np.full(3, np.finfo(np.float32).max)
    assert np.isfinite(decoded(Wire.INT8, top)).all()
    assert np.isinf(decoded(Wire.FP16, np.array([65520], np.float32))).all()
    assert decoded(Wire.FP16, np.array([65519.9], np.float32)).tolist() == [65504]
    assert decoded(Wire.INT8, np.array([2.0**-120, -1e-45], np.float32)).tolist() == [0, 0]
    assert decoded(Wire.INT8, np.array([2.0**-119], np.float32))[0] > 0


def test_the_bytes_of_a_block() -> None:
    array = np.array([127, -63.4, 0.5, 1.5, 2.5], np.float32)
    assert encode(Wire.INT8, array).tobytes() == np.float32(1).tobytes() + bytes([127, 256 - 63, 0, 2, 2])
    assert [encoded_bytes(Wire.INT8, n) for n in (0, 1, 256, 257, 512)] == [0, 5, 260, 265, 520]
    assert [encoded_bytes(wire, 7) for wire in (Wire.NONE, Wire.FP16, Wire.BF16)] == [28, 14, 14]
    assert encode(Wire.BF16, np.array([1], np.float32)).tobytes() == b"\x80\x3f"


@given(array=arrays(np.float32, st.integers(1, 600), elements=st.floats(-60000, 60000, width=32)))
def test_an_encoding_changes_an_element_by_at_most_the_stated_error(array: Floats) -> None:
    for wire, form in FORMATS.items():
        padded = np.zeros(-(-array.size // form.block) * form.block)
        padded[: array.size] = np.abs(array)
        largest = np.repeat(padded.reshape(-1, form.block).max(axis=1), form.block)[: array.size]
        change = np.abs(decoded(wire, array).astype(np.float64) - array)
        # The smallest normal float16 is 2^-14. Steps between smaller numbers do not shrink with the number.
        assert np.all(change <= form.error * np.maximum(largest, 2.0**-14) * 1.0001)


def test_the_stated_errors_are_reached() -> None:
    array = np.random.default_rng(1).uniform(1, 1.01, 256 * 256).astype(np.float32)
    for wire, form in FORMATS.items():
        assert np.abs(decoded(wire, array) - array).max() > 0.9 * form.error


def test_names() -> None:
    assert list(WIRES) == [wire.name.lower() for wire in Wire][1:]
    assert [wire_of(name) for name in (None, "fp16", "bf16", "int8")] == list(Wire)
    for wrong in ("none", "FP16", "int4", 8, ["fp16"]):
        with pytest.raises(ArgumentError, match=r"wire=.*: want one of fp16, bf16, int8, or None"):
            wire_of(wrong)


# --- frames and schedules ---


def _frame(grid: tuple[int, ...], wires: tuple[Wire, ...], *, shuffled: bool = False, shares: Any = (1,)) -> Frame:
    return replace(frame_on(Collective.ALL_REDUCE, grid, shuffled=shuffled, shares=shares), wires=wires)


@pytest.mark.parametrize(
    ("collective", "grid", "wires", "match"),
    [
        (Collective.ALL_REDUCE, (2, 2), (Wire.BF16,), "want one Wire for each of the 2 axes"),
        (Collective.ALL_REDUCE, (2,), ("bf16",), "want one Wire for each"),
        (
            Collective.ALL_REDUCE,
            (2, 2),
            (Wire.BF16, Wire.NONE),
            "wires=bf16,none on grid .*: an axis after a coded axis",
        ),
        (Collective.ALL_GATHER, (2,), (Wire.INT8,), "wires=int8 for all_gather: only an all_reduce"),
        (Collective.REDUCE_SCATTER, (2,), (Wire.FP16,), "only an all_reduce can be coded"),
    ],
)
def test_a_bad_wire_is_named(collective: Collective, grid: tuple[int, ...], wires: Any, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        replace(frame_on(collective, grid), wires=wires)


def test_an_axis_of_one_rank_codes_nothing() -> None:
    schedule = build("direct", _frame((3, 1), (Wire.BF16, Wire.NONE)))
    check(schedule)
    assert not (build("direct", _frame((3, 1), (Wire.NONE, Wire.INT8))).moves_of(0).wire).any()


@pytest.mark.parametrize(
    ("algorithm", "wires"),
    [
        ("ring", (Wire.NONE, Wire.BF16)),
        ("direct_ring", (Wire.NONE, Wire.INT8)),
        ("exchange", (Wire.FP16, Wire.FP16)),
        ("exchange", (Wire.NONE, Wire.FP16)),
    ],
)
def test_only_direct_patterns_are_coded(algorithm: str, wires: tuple[Wire, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"wires=.* rounds more than once on a coded axis.*use direct"):
        build(algorithm, _frame((2, 2), wires))


@pytest.mark.parametrize(
    ("algorithm", "match"), [("ring", "coded 2 times, want at most 1"), ("exchange", "end with other bits")]
)
def test_the_proof_refuses_what_the_builder_does(algorithm: str, match: str) -> None:
    exact = build(algorithm, _frame((3,), ()))
    coded = replace(exact, frame=replace(exact.frame, wires=(Wire.BF16,)))
    for proof in (check, lambda schedule: check_moves(schedule, all_moves(schedule))):
        with pytest.raises(ScheduleError, match=match):
            proof(coded)


def test_coded_16_bit_sums_are_refused() -> None:
    with pytest.raises(ScheduleError, match="wire types code float32 sums"):
        build("direct", _frame((2,), (Wire.BF16,)), Accumulation.WIDE)


def test_a_schedule_says_what_is_coded() -> None:
    schedule = build("direct", _frame((2, 4), (Wire.NONE, Wire.INT8)))
    assert str(schedule) == "direct all_reduce on 2 x 4 ranks, wires none,int8"
    assert "axis 2: direct_reduce_scatter on 2 lines of 4 ranks, int8 on the wire" in schedule.describe()
    assert "axis 1: direct_reduce_scatter on 4 lines of 2 ranks\n" in schedule.describe()
    others = [_frame((2, 4), wires) for wires in ((), (Wire.NONE, Wire.BF16), (Wire.INT8, Wire.INT8))]
    digests = {build("direct", frame).digest() for frame in others} | {schedule.digest()}
    assert len(digests) == 4
    # A list of axes without any coded axis changes nothing.
    assert build("direct", _frame((2, 4), (Wire.NONE,) * 2)).digest() == build("direct", _frame((2, 4), ())).digest()


# --- proofs ---

CODED_GRIDS = [
    *[((p,), (wire,)) for p, wire in ((1, Wire.INT8), (2, Wire.FP16), (3, Wire.BF16), (7, Wire.INT8))],
    *[((2, 2), wires) for wires in ((Wire.NONE, Wire.BF16), (Wire.BF16, Wire.INT8), (Wire.INT8, Wire.INT8))],
    *[((2, 3), (Wire.NONE, Wire.INT8)), ((3, 2), (Wire.FP16, Wire.FP16)), ((2, 4), (Wire.NONE, Wire.BF16))],
    *[((2, 2, 2), (Wire.NONE, Wire.FP16, Wire.INT8)), ((2, 1, 3), (Wire.NONE, Wire.NONE, Wire.BF16))],
]
SMALL = [each for each in CODED_GRIDS if math.prod(each[0]) <= 6 and math.prod(each[0]) > 1]


@pytest.mark.parametrize(("grid", "wires"), CODED_GRIDS)
def test_the_rule_and_the_proof_of_all_moves_accept_coded_axes(grid: tuple[int, ...], wires: tuple[Wire, ...]) -> None:
    for frame in (_frame(grid, wires), _frame(grid, wires, shuffled=True, shares=(3, 1, 2))):
        schedule = build("direct", frame)
        check(schedule)
        check_moves(schedule, all_moves(schedule))


def test_the_first_axis_may_be_coded_under_exact_rings_of_one() -> None:
    schedule = build("direct_ring", _frame((3, 1), (Wire.INT8, Wire.NONE)))
    check(schedule)


def _is_rounded_elsewhere(program: list[Move], mutant: list[Move], wires: tuple[Wire, ...]) -> bool:
    """Return whether the mutant only skips a rounding that another gather repeats: the bits are the same."""
    kept = [index for index, move in enumerate(program) if move.kind is Kind.SEND and move.dst != NOWHERE]
    if len(kept) < 2 or len(set(wires)) > 1:
        return False
    without = [[*program[:at], program[at]._replace(dst=NOWHERE), *program[at + 1 :]] for at in kept]
    return mutant in without


@pytest.mark.parametrize(("grid", "wires"), SMALL)
def test_every_single_mutation_of_a_coded_schedule_is_caught(grid: tuple[int, ...], wires: tuple[Wire, ...]) -> None:
    schedule = build("direct", _frame(grid, wires))
    programs = all_moves(schedule)
    for rank in (0, schedule.ranks - 1):
        rows = list(programs[rank].rows())
        mutants = mutants_of(rows, schedule.ranks, 2 * schedule.ranks)
        for index, move in enumerate(rows):
            others = [move._replace(wire=wire) for wire in Wire if wire is not move.wire]
            mutants += [(f"{index}: {other}", [*rows[:index], other, *rows[index + 1 :]]) for other in others]
        for name, mutant in mutants:
            if _is_rounded_elsewhere(rows, mutant, wires):
                continue
            with pytest.raises(ScheduleError):  # noqa: PT012 the second line names the mutant that passed
                check_moves(schedule, {**programs, rank: Moves.of(mutant)})
                pytest.fail(name)


def test_an_owner_that_keeps_its_exact_sum_is_refused() -> None:
    schedule = build("direct", _frame((2, 3), (Wire.NONE, Wire.BF16)))
    programs = all_moves(schedule)
    mutant = [move._replace(dst=NOWHERE) if move.kind is Kind.SEND else move for move in programs[4].rows()]
    with pytest.raises(ScheduleError, match="ranks 0 and 4 end with other bits in chunk"):
        check_moves(schedule, {**programs, 4: Moves.of(mutant)})


def test_a_rank_that_adds_in_another_order_is_refused() -> None:
    # Without any wire, the sums are complete, but their bits differ.
    schedule = build("exchange", _frame((3,), ()))
    programs = all_moves(schedule)
    rows = list(programs[1].rows())
    mutant = [*rows[:-1], rows[-1]._replace(peers=rows[-1].peers[::-1])]
    with pytest.raises(ScheduleError, match="ranks 0 and 1 end with other bits in chunk 0"):
        check_moves(schedule, {**programs, 1: Moves.of(mutant)})


def test_what_is_not_finished_is_not_rounded_in_place() -> None:
    schedule = build("direct", _frame((2,), (Wire.BF16,)))
    programs = all_moves(schedule)
    rows = list(programs[0].rows())
    mutant = [rows[0]._replace(dst=rows[0].src), *rows[1:]]
    with pytest.raises(ScheduleError, match="chunk 1 is rounded for its peers before it is finished"):
        check_moves(schedule, {**programs, 0: Moves.of(mutant)})


def test_a_message_of_another_wire_type_is_named() -> None:
    schedule = build("direct", _frame((2,), (Wire.BF16,)))
    programs = all_moves(schedule)
    mutant = [move._replace(wire=Wire.FP16) for move in programs[0].rows()]
    with pytest.raises(ScheduleError, match="rank 0 sends wire type fp16, but rank 1 expects bf16"):
        check_moves(schedule, {**programs, 0: Moves.of(mutant)})


def test_a_coded_gather_over_what_exact_peers_may_still_read_is_refused() -> None:
    # `Frame` rejects this grid; the proof finds the underlying race.
    coded_first = build("direct", _frame((2, 2), (Wire.BF16, Wire.BF16)))
    plain = {rank: list(moves.rows()) for rank, moves in all_moves(build("direct", _frame((2, 2), ()))).items()}
    programs = {}
    for rank, moves in all_moves(coded_first).items():
        second = {peer for peer in range(4) if peer // 2 != rank // 2}  # along the second axis
        programs[rank] = Moves.of(
            [exact if second & {*move.peers} else move for move, exact in zip(moves.rows(), plain[rank], strict=True)]
        )
    promise = promise_of(coded_first.frame, 4)
    with pytest.raises(ScheduleError, match="may still be reading"):
        prove(promise, programs)


# --- results ---


def _inputs(ranks: int, elements: int, seed: int = 0) -> list[Floats]:
    generator = np.random.default_rng([ranks, elements, seed])
    return [generator.standard_normal(elements).astype(np.float32) * np.float32(2**rank) for rank in range(ranks)]


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize(("p", "elements"), [(2, 5), (3, 1000), (4, 1025), (5, 256)])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_one_axis_computes_what_the_page_says(wire: Wire, p: int, elements: int, op: str) -> None:
    """The expected result: the owner adds the decoded parts of the others in order; all ranks get the decoded sum."""
    schedule = build("direct", _frame((p,), (wire,)))
    operands = _inputs(p, elements)
    grain = 256 if wire is Wire.INT8 else 16
    bounds = [elements * i // p // grain * grain for i in range(p)] + [elements]
    want = np.zeros(elements, np.float32)
    for owner in range(p):
        part = slice(bounds[owner], bounds[owner + 1])
        total = None
        for rank, operand in enumerate(operands):
            arrived = operand[part] if rank == owner else decoded(wire, operand)[part]
            total = arrived if total is None else total + arrived
        total = total / np.float32(p) if op == "average" else total
        want[part] = decoded(wire, np.concatenate([np.zeros(part.start, np.float32), total]))[part.start :]
    done = interpret(schedule, operands, op)
    for output in done.outputs:
        assert _bits(output) == _bits(want)


@pytest.mark.parametrize(("grid", "wires"), CODED_GRIDS)
def test_all_ranks_get_the_same_bits_near_the_sum(grid: tuple[int, ...], wires: tuple[Wire, ...]) -> None:
    for shares, elements in (((1,), 3000), ((3, 1, 2), 2777)):
        schedule = build("direct", _frame(grid, wires, shuffled=True, shares=shares))
        operands = _inputs(schedule.ranks, elements)
        outputs = interpret(schedule, operands).outputs
        assert {output.tobytes() for output in outputs} == {outputs[0].tobytes()}
        exact = np.sum(operands, axis=0, dtype=np.float64)
        peak = sum(float(np.abs(operand).max()) for operand in operands)
        steps = 2 * sum(wire is not Wire.NONE for wire in wires)
        unit = max({Wire.NONE: 2.0**-20, Wire.FP16: 2.0**-11, Wire.BF16: 2.0**-8, Wire.INT8: 1 / 250}[w] for w in wires)
        assert np.abs(outputs[0] - exact).max() <= (steps * unit + 2.0**-20) * peak * 1.1


def test_what_is_coded_already_travels_unchanged() -> None:
    # This is the purpose of `multiring.quantize_dequantize`: the only error left is the rounding of the sum itself.
    for wire in LOSSY:
        operands = [decoded(wire, each) for each in _inputs(4, 3000)]
        total = operands[0] + operands[1] + operands[2] + operands[3]
        got = interpret(build("direct", _frame((4,), (wire,))), operands).outputs[0]
        assert _bits(got) == _bits(decoded(wire, total))


@pytest.mark.parametrize("wire", LOSSY)
def test_an_overflow_on_one_rank_is_seen_on_all(wire: Wire) -> None:
    operands = _inputs(3, 900)
    operands[1][500] = np.inf
    for output in interpret(build("direct", _frame((3,), (wire,))), operands, "average").outputs:
        assert not np.isfinite(output[500])


@pytest.mark.parametrize(("dtype", "op"), [("float64", "sum"), ("int32", "sum"), ("float32", "max")])
def test_only_sums_of_float32_are_coded(dtype: str, op: str) -> None:
    with pytest.raises(ScheduleError, match="want a sum or an average of float32"):
        interpret(build("direct", _frame((2,), (Wire.BF16,))), [np.ones(40, dtype)] * 2, op)


def test_a_coded_message_that_is_too_short_is_named() -> None:
    schedule = build("direct", _frame((2,), (Wire.INT8,)))
    with pytest.raises(ScheduleError, match="do not hold"):
        interpret(schedule, [np.ones(600, np.float32), np.ones(1200, np.float32)])


# --- costs ---

LINK = Link(latency_s=30e-6, overhead_s=4e-6, bandwidth_bytes_per_s=1e8, reduce_bytes_per_s=5e9)


@pytest.mark.parametrize(("wire", "share"), [(Wire.FP16, 0.5), (Wire.BF16, 0.5), (Wire.INT8, 260 / 1024)])
@pytest.mark.parametrize("p", [2, 4, 9])
def test_a_coded_axis_costs_its_closed_form(wire: Wire, share: float, p: int) -> None:
    schedule = build("direct", _frame((p,), (wire,)))
    assert {phase.pattern.effect for phase in schedule.phases} == {Effect.REDUCE_SCATTER, Effect.ALL_GATHER}
    n = 8 << 20
    handled_s, wire_s = LINK.overhead_s, share * n / p / LINK.bandwidth_bytes_per_s
    sent_s = LINK.latency_s + min(handled_s, wire_s) + (p - 1) * max(handled_s, wire_s)
    coding_s = n / p / LINK.reduce_bytes_per_s
    # In both directions: encode, send, decode.
    assert price(schedule, n, [LINK]) == pytest.approx(2 * (2 * coding_s + sent_s), rel=1e-12)


def test_two_schedules_of_one_digest_are_one() -> None:
    frame = _frame((4,), (Wire.INT8,))
    assert isinstance(build("direct", frame), Schedule)
    assert build("direct", frame).digest() == build("direct", replace(frame)).digest()
