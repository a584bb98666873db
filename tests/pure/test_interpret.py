"""Every schedule computes NumPy's result, for all collectives, types, operations and uneven sizes."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.schedules import all_moves, counts_for, every_schedule, frame_on

from multiring._collectives import TABLE, build
from multiring._schedule import (
    Accumulation,
    Collective,
    Kind,
    Move,
    Moves,
    Pattern,
    Phase,
    Schedule,
    Splits,
    accumulation_of,
    interpret,
)
from multiring.errors import ArgumentError, ScheduleError

Array = NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")]
FLOATS = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]


def _inputs(schedule: Schedule, dtype: np.dtype[Any], block: int = 5) -> list[Array]:
    generator = np.random.default_rng(schedule.ranks)
    counts = counts_for(schedule, block)
    arrays = []
    for rank, mine in enumerate(counts):
        if schedule.collective is Collective.ALL_GATHER:
            size = mine[rank] if isinstance(mine, list) else 0
        elif isinstance(mine, Splits):
            size = sum(mine.send)
        else:
            size = mine if isinstance(mine, int) else int(np.sum(mine))
        arrays.append(generator.integers(0, 100, size).astype(dtype))
    return arrays


def _wanted(schedule: Schedule, arrays: list[Array], block: int = 5) -> list[Array]:
    """Return NumPy's results on the whole arrays, as an oracle independent of the schedule."""
    p, counts = schedule.ranks, counts_for(schedule, block)
    if schedule.collective is Collective.ALL_REDUCE:
        return [np.sum(arrays, axis=0)] * p
    if schedule.collective is Collective.BROADCAST:
        return [arrays[schedule.root]] * p
    if schedule.collective is Collective.ALL_GATHER:
        return [np.concatenate(arrays)] * p
    if schedule.collective is Collective.REDUCE_SCATTER:
        return np.split(np.sum(arrays, axis=0), np.cumsum(counts[0])[:-1].tolist())
    splits = [each for each in counts if isinstance(each, Splits)]
    sends = [np.split(array, np.cumsum(each.send)[:-1]) for array, each in zip(arrays, splits, strict=True)]
    return [np.concatenate([sends[i][j] for i in range(p)]) for j in range(p)]


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        *itertools.product([(1,), (2,), (5,), (1, 1), (2, 3), (4, 2), (3, 1, 2), (2, 2, 2)], [7]),
        *itertools.product([(2,), (5,), (2, 3)], [0]),  # the moves are the same for any number of elements
        *itertools.product([(5,), (2, 3)], [40]),
    ],
    ids=str,
)
def test_every_schedule_computes_what_numpy_does(grid: tuple[int, ...], block: int) -> None:
    for schedule in every_schedule(grid):
        arrays = _inputs(schedule, np.dtype(np.int64), block)
        before = [array.copy() for array in arrays]
        done = interpret(schedule, arrays, "sum", counts_for(schedule, block))
        for got, want in zip(done.outputs, _wanted(schedule, arrays, block), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.concatenate(arrays), np.concatenate(before))
        assert done.log == tuple(tuple(moves.rows()) for moves in all_moves(schedule).values())


def test_equal_blocks_need_no_counts() -> None:
    arrays = [np.arange(12) + 100 * rank for rank in range(3)]
    scatter = interpret(build("ring", frame_on(Collective.REDUCE_SCATTER, (3,))), arrays)
    np.testing.assert_array_equal(np.concatenate(scatter.outputs), np.sum(arrays, axis=0))
    exchange = interpret(build("direct", frame_on(Collective.ALL_TO_ALL, (3,))), arrays)
    np.testing.assert_array_equal(exchange.outputs[1], np.concatenate([array[4:8] for array in arrays]))
    gather = interpret(
        build("ring", frame_on(Collective.ALL_GATHER, (3,))), [array[:rank] for rank, array in enumerate(arrays)]
    )
    np.testing.assert_array_equal(gather.outputs[0], [100, 200, 201])


# --- operations and types; docs/algorithms.md is the specification ---


def _all_reduced(values: list[list[Any]], dtype: Any, op: str) -> Array:
    arrays = [np.array(value, dtype) for value in values]
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (len(arrays),)), accumulation_of(np.dtype(dtype), op))
    return interpret(schedule, arrays, op).outputs[0]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_operations_on_small_numbers(dtype: np.dtype[Any]) -> None:
    values = [[1, 6, 3], [5, 2, 3], [3, 4, 3]]
    for op, want in {
        "sum": [9, 12, 9],
        "min": [1, 2, 3],
        "max": [5, 6, 3],
        "product": [15, 48, 27],
        "average": [3, 4, 3],
    }.items():
        got = _all_reduced(values, dtype, op)
        assert got.dtype == dtype
        assert got.tolist() == want


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_sums_and_products_wrap_and_averages_do_not(dtype: np.dtype[Any]) -> None:
    top = int(np.iinfo(dtype).max)
    turn = 1 << 8 * dtype.itemsize

    def wrapped(value: int) -> int:
        low = value % turn
        return low - turn if dtype.kind == "i" and low >= turn // 2 else low

    assert _all_reduced([[top], [top], [3]], dtype, "sum").tolist() == [wrapped(2 * top + 3)]
    assert _all_reduced([[top], [top], [3]], dtype, "product").tolist() == [wrapped(top * top * 3)]
    assert _all_reduced([[top], [top], [top]], dtype, "average").tolist() == [top]
    if dtype.kind == "i":
        assert _all_reduced([[-1], [-1], [-2]], dtype, "average").tolist() == [-1]  # truncates toward zero


def test_bools_are_any_and_all() -> None:
    values = [[False, False, True, True], [False, True, False, True]]
    for op, want in {
        "sum": np.logical_or,
        "max": np.logical_or,
        "product": np.logical_and,
        "min": np.logical_and,
    }.items():
        assert _all_reduced(values, np.bool_, op).tolist() == want(np.array(values[0]), np.array(values[1])).tolist()


@pytest.mark.parametrize(
    ("op", "dtype", "match"),
    [
        ("average", "bool", "average of bools"),
        ("mean", "float32", "op='mean': want one of sum, average, min, max, product"),
        ("sum", "complex64", "dtype=complex64: want a float"),
        ("sum", "<U3", "dtype=<U3: want a float"),
    ],
)
def test_meaningless_operations_are_refused(op: str, dtype: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        accumulation_of(np.dtype(dtype), op)
    with pytest.raises(ArgumentError, match=match):
        interpret(build("direct", frame_on(Collective.ALL_REDUCE, (2,))), [np.zeros(1, dtype)] * 2, op)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_floats_have_one_meaning(dtype: np.dtype[Any]) -> None:
    quiet = np.array(np.nan, dtype).tobytes()
    negative_nan = -np.array([np.nan], dtype)
    for op in ("sum", "average", "min", "max", "product"):
        arrays = [np.array([1.0], dtype), negative_nan, np.array([2.0], dtype)]
        schedule = build("direct", frame_on(Collective.ALL_REDUCE, (3,)), accumulation_of(dtype, op))
        assert interpret(schedule, arrays, op).outputs[2].tobytes() == quiet
    # If operands are equal, the later one wins.
    assert np.signbit(_all_reduced([[0.0], [-0.0]], dtype, "min").astype(np.float64))
    assert not np.signbit(_all_reduced([[-0.0], [0.0]], dtype, "min").astype(np.float64))
    assert np.signbit(_all_reduced([[0.0], [-0.0]], dtype, "max").astype(np.float64))
    assert _all_reduced([[np.inf], [1]], dtype, "sum").tolist() == [np.inf]


def test_sixteen_bits_are_summed_in_float32_and_rounded_once() -> None:
    # Rounded one at a time, 2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16.
    assert _all_reduced([[2048], *[[1]] * 8], np.float16, "sum").tolist() == [2056]
    assert _all_reduced([[256], *[[1]] * 8], BFLOAT16, "sum").astype(float).tolist() == [264]
    # The sum exceeds float16's maximum of 65504, but the average does not.
    assert _all_reduced([[60000], [60000]], np.float16, "average").tolist() == [60000]


def test_an_average_divides_and_does_not_multiply_by_a_reciprocal() -> None:
    for p in (3, 5, 7):
        got = _all_reduced([[float(p * 49)], *[[0.0]] * (p - 1)], np.float32, "average")
        assert got.tolist() == [49.0]


def test_an_accumulation_that_would_lose_bits_is_refused() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (3,)))
    with pytest.raises(ScheduleError, match="sum of float16 needs wide accumulation, but the schedule has same"):
        interpret(schedule, [np.zeros(9, np.float16)] * 3)
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (2, 2)), Accumulation.WIDE)
    with pytest.raises(ScheduleError, match="average of int8 needs once accumulation"):
        interpret(schedule, [np.zeros(9, np.int8)] * 4, "average")
    assert interpret(schedule, [np.ones(9, np.float16)] * 4, "max").outputs[0].tolist() == [1.0] * 9


# --- the error bound of docs/algorithms.md ---

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


@given(
    ranks=st.sampled_from([((2,), 2), ((5,), 5), ((2, 3), 6), ((4, 4), 16)]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**32 - 1),
)
def test_float_sums_are_within_the_documented_bound(
    ranks: tuple[tuple[int, ...], int], dtype: np.dtype[Any], seed: int
) -> None:
    grid, p = ranks
    generator = np.random.default_rng(seed)
    exponents = np.exp2(generator.integers(-4, 5, (p, 64)))
    arrays = [row.astype(dtype) for row in generator.standard_normal((p, 64)) * exponents]
    exact = np.sum([array.astype(np.longdouble) for array in arrays], axis=0)
    size = np.sum([np.abs(array.astype(np.longdouble)) for array in arrays], axis=0)
    axes = sum(length > 1 for length in grid)
    wide = accumulation_of(dtype, "sum") is Accumulation.WIDE
    unit = ROUNDOFF[dtype.name]
    # Each addition rounds at most once. Wide sums round in float32, and once more on each axis.
    bound = ((p - 1) * ROUNDOFF["float32"] + axes * unit if wide else (p - 1) * unit) * size * 1.01
    for algorithm in ["direct"] if wide else ["direct", "ring", "direct_ring"]:
        schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, grid), accumulation_of(dtype, "sum"))
        outputs = interpret(schedule, arrays, "sum").outputs
        assert (np.abs(outputs[0].astype(np.longdouble) - exact) <= bound).all()
        assert {output.tobytes() for output in outputs} == {outputs[0].tobytes()}


# --- arguments that do not fit ---


def test_arrays_that_do_not_fit_are_refused() -> None:
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (2,)))
    one = np.zeros(4)
    with pytest.raises(ScheduleError, match="1 arrays, counts None for 2 ranks"):
        interpret(schedule, [one])
    with pytest.raises(ScheduleError, match=r"2 arrays, counts \[4\] for 2 ranks"):
        interpret(schedule, [one, one], counts=[4])
    with pytest.raises(ScheduleError, match="want arrays of one type, with one dimension"):
        interpret(schedule, [one, one.astype(np.float32)])
    with pytest.raises(ScheduleError, match="want arrays of one type, with one dimension"):
        interpret(schedule, [one.reshape(2, 2)] * 2)
    with pytest.raises(ScheduleError, match="an array of 4 elements: its chunks have"):
        interpret(schedule, [one, one], counts=[4, 5])
    with pytest.raises(ScheduleError, match="elements do not fit"):
        interpret(schedule, [one, np.zeros(40)])


def test_programs_that_wait_for_ever_are_named() -> None:
    def program(p: int, i: int) -> Moves:
        return Moves.of([Move(Kind.COPY, 0, -1, i, 1, False, ((i + 1) % p,))])

    good = build("direct", frame_on(Collective.ALL_REDUCE, (2,)))
    stuck = Pattern("stuck", good.phases[0].pattern.effect, program)
    schedule = Schedule(algorithm="stuck", frame=good.frame, phases=(Phase(0, stuck),))
    with pytest.raises(ScheduleError, match=r"deadlock: ranks \[0, 1\] wait for ever"):
        interpret(schedule, [np.zeros(4)] * 2)


def test_every_entry_of_the_table_is_interpreted() -> None:
    assert {(s.collective, s.algorithm) for s in every_schedule((2, 3))} == set(TABLE)
