"""Lossy wires on every engine: results equal the interpreter's bits on every rank, and bad uses are rejected."""

import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tests.support.cases import OVER_A_WINDOW, Case, assert_same, digest_of, operand, place
from tests.support.ranks import Here, run_ranks

import multiring
from multiring._runtime.group.compile import Segments
from multiring._schedule import Collective, Kind, decoded, encoded_bytes, wire_of
from multiring.errors import ArgumentError, MismatchError
from multiring.planner import plan

WIRES = ("fp16", "bf16", "int8")
PLACES = [("tcp", 2), ("tcp", 3), ("tcp", 4), ("shm+tcp", 3), ("shm+tcp", 4)]
ODD = (0, 1, 255, 1000, 12_345)


def coded_cases() -> Iterator[Case]:
    """Yield every wire type with odd sizes in both kinds of memory, and one case over a window of the tcp engine."""
    for seed, (wire, rows, in_arena) in enumerate(itertools.product(WIRES, ODD, (False, True))):
        op = "average" if seed % 2 else "sum"
        yield Case(Collective.ALL_REDUCE, "float32", op, rows, in_arena=in_arena, seed=seed, wire=wire)
    for wire in WIRES:
        yield Case(Collective.ALL_REDUCE, "float32", "sum", OVER_A_WINDOW, seed=7, wire=wire)


def conform(here: Here, most_rows: float = math.inf) -> list[bytes]:
    """Run the cases, compare them with the interpreter and the exact sum, and return digests."""
    group = here.join()
    digests = []
    for number, case in enumerate(case for case in coded_cases() if case.rows <= most_rows):
        chosen = group._calls.plan_of(case.request(here.rank, here.size))
        assert chosen.wire is wire_of(case.wire)
        result = case.run(group, place(group, case.operand(here.rank, here.size), in_arena=case.in_arena))
        # One rank checks each case; equal digests extend the check to the other ranks.
        if number % here.size == here.rank:
            assert_same(result, case.reference(chosen, here.rank, here.size), case)
            operands = [case.operand(rank, here.size) for rank in range(here.size)]
            exact = np.sum(operands, axis=0, dtype=np.float64) / (here.size if case.op == "average" else 1)
            far = np.abs(result - exact).max(initial=0)
            assert far <= 0.05 * here.size, case  # values are at most 5 in size, so the error is about 4 / 254 a rank
            assert case.rows < 1000 or far > 0, f"{case}: nothing was coded"
        digests.append(digest_of(result))
    return digests


@pytest.mark.parametrize(("engine", "ranks"), PLACES)
def test_every_wire_type(engine: str, ranks: int) -> None:
    first, *others = run_ranks(conform, ranks, engine=engine)
    assert all(other == first for other in others)


def conform_in_segments(here: Here, segment_bytes: int) -> list[bytes]:
    with patch.object(plan, "segments_of", lambda *_: (segment_bytes,)):
        return conform(here, most_rows=20 * segment_bytes)


@pytest.mark.parametrize(("engine", "ranks"), [("tcp", 3), ("shm+tcp", 4)])
def test_many_segments(engine: str, ranks: int) -> None:
    """Segments have odd lengths and outnumber the lanes, so sockets deliver data that ends anywhere in a block."""
    first, *others = run_ranks(conform_in_segments, ranks, 2500, engine=engine)
    assert all(other == first for other in others)


def compare_logs(here: Here) -> int:
    """Check that coded moves in the log have the bytes of `encoded_bytes`; return their number."""
    group = here.join(log_moves=True)
    coded = 0
    for wire in WIRES:
        case = Case(Collective.ALL_REDUCE, "float32", "sum", 100_001, seed=1, wire=wire)
        request = case.request(here.rank, here.size)
        chosen = group._calls.plan_of(request)
        case.run(group, place(group, case.operand(here.rank, here.size), in_arena=False))
        log = sorted(group._calls.latest.log, key=lambda entry: entry.segment)
        segments = Segments.of(chosen, request)
        want = []
        for index in range(segments.count):
            elements = segments.last if index == segments.count - 1 else segments.each
            extents = chosen.schedule.extents_of(here.rank, elements)
            for number, move in enumerate(chosen.schedule.moves_of(here.rank).rows()):
                first = move.src if move.kind is Kind.SEND else move.dst
                count = int(extents.count[first : first + move.span].sum())
                others = sum(peer != here.rank for peer in move.peers)
                size = others * encoded_bytes(move.wire, count) + (len(move.peers) - others) * 4 * count
                want.append((None, index, number, size))
                coded += bool(move.wire)
        assert log == want
    return coded


@pytest.mark.parametrize(("engine", "ranks"), [("tcp", 3), ("shm+tcp", 4)])
def test_the_log_has_the_coded_bytes(engine: str, ranks: int) -> None:
    assert min(run_ranks(compare_logs, ranks, engine=engine)) >= 4 * len(WIRES)


def beside_exact(here: Here) -> None:
    """Reduce the same array coded and exact in turn, blocking and not; the calls must not be confused."""
    group = here.join()
    array = group.allocate(5000, np.float32)
    mine = operand("float32", "sum", (5000,), (3, here.rank))
    exact = np.sum([operand("float32", "sum", (5000,), (3, rank)) for rank in range(here.size)], axis=0, dtype="f8")
    for _ in range(3):
        for wire, is_exact in ((None, True), ("int8", False), ("int8", False), (None, True)):
            array[...] = mine
            group.all_reduce(array, wire=wire)
            assert bool(np.abs(array - exact).max() < 1e-4) is is_exact
            array[...] = mine
            group.all_reduce_async(array, wire=wire).wait()
            assert bool(np.abs(array - exact).max() < 1e-4) is is_exact


def test_coded_and_exact_calls_in_turn() -> None:
    run_ranks(beside_exact, 2, engine="tcp")


def within_a_host(here: Here) -> Any:
    group = here.join()
    array = operand("float32", "sum", (3000,), (4, here.rank)).copy()
    plain = array.copy()
    group.all_reduce(array, wire="int8")
    group.all_reduce(plain)
    return array.tobytes() == plain.tobytes()


def test_within_a_host_nothing_is_coded() -> None:
    assert run_ranks(within_a_host, 3) == [True] * 3


def refused(here: Here) -> None:
    group = here.join()
    ones = np.ones(100, np.float32)
    wrong: tuple[tuple[Any, str, Any, str], ...] = (
        (
            ones.astype(np.float64),
            "sum",
            "bf16",
            "wire='bf16' for the sum of float64: want a sum or an average of float32",
        ),
        (ones.astype(np.int32), "sum", "fp16", "for the sum of int32"),
        (ones, "max", "int8", "wire='int8' for the max of float32"),
        (ones, "sum", "int4", "wire='int4': want one of fp16, bf16, int8, or None"),
        (ones, "sum", 16, "wire=16: want one of"),
    )
    for array, op, wire, match in wrong:
        before = array.copy()
        with pytest.raises(ArgumentError, match=match):
            group.all_reduce(array, op, wire=wire)
        with pytest.raises(ArgumentError, match=match):
            group.all_reduce_async(array, op, wire=wire)
        assert array.tobytes() == before.tobytes()
    for other in ("bf16", None):
        array = ones.copy()
        with pytest.raises(MismatchError, match=r"all_reduce sum float32 of shape .100,., wire fp16"):
            group.all_reduce(array, wire=other if here.rank else "fp16")
        assert array.tobytes() == ones.tobytes()
    group.all_reduce(ones, wire="bf16")
    assert (ones == here.size).all()


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_what_cannot_be_coded_is_refused_and_the_group_stays_usable(engine: str) -> None:
    run_ranks(refused, 2, engine=engine)


# --- quantize_dequantize ---


@pytest.mark.parametrize("wire", WIRES)
def test_round_trip_is_what_arrives(wire: str) -> None:
    for shape in ((0,), (1,), (3, 1001), (20_000,)):
        array = operand("float32", "sum", shape, (5,))
        got = multiring.quantize_dequantize(array, wire)
        assert_same(got, decoded(wire_of(wire), array), wire)
        assert got is not array
        assert_same(multiring.quantize_dequantize(got, wire), got, wire)
    # Blocks follow the order in memory, as in an all_reduce.
    turned = operand("float32", "sum", (30, 700), (6,)).T
    assert_same(multiring.quantize_dequantize(turned, wire).T, decoded(wire_of(wire), turned.T), wire)
    strided = operand("float32", "sum", (1000,), (7,))[::3]
    assert_same(multiring.quantize_dequantize(strided, wire), decoded(wire_of(wire), strided), wire)


def test_round_trip_refuses_what_is_not_float32() -> None:
    ones = np.ones(3, np.float32)
    assert_same(multiring.quantize_dequantize(ones, None), ones, None)
    with pytest.raises(ArgumentError, match="quantize_dequantize of float64: want a NumPy array of float32"):
        multiring.quantize_dequantize(ones.astype(np.float64), "bf16")
    with pytest.raises(ArgumentError, match="quantize_dequantize of list"):
        multiring.quantize_dequantize([1.0], "bf16")
    with pytest.raises(ArgumentError, match="wire='half'"):
        multiring.quantize_dequantize(ones, "half")
