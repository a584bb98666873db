"""What the bench measures, and with what confidence: sizes, data, expected results and intervals."""

import itertools
import json
import math
import random
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from multiring._bench.cases import Question, parse_size, size_text
from multiring._bench.compare import Manner, check_memory, cores_for
from multiring._bench.statistics import median_interval, ratio_interval
from multiring._bench.workers import contract
from multiring.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "size"),
    [("64", 64), ("64B", 64), (" 1 KiB", 1024), ("1.5mib", 3 << 19), ("64MiB", 64 << 20), ("2GiB", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1MB", "MiB", "1.5", "1e6", "0.3KiB", "64 bytes"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"is not a size, want bytes"):
        parse_size(text)


@pytest.mark.parametrize("size", [1, 64, 100, 1024, 1536, 1 << 20, 3 << 19, 64 << 20, 1 << 30])
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    assert parse_size(size_text(size)) == size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "gather"}, "unknown collective 'gather', want one of all_reduce"),
        ({"dtype": "float8"}, "unknown type 'float8', want one of bfloat16"),
        ({"op": "xor"}, "unknown operation 'xor', want one of sum"),
        ({"ranks": 0}, "a job of 0 ranks: want at least 1"),
        ({"size_bytes": 6}, "6 bytes of float32 cannot be the buffer of all_reduce on 3 ranks; want a multiple of 4"),
        ({"size_bytes": 64, "collective": "all_gather"}, "want a multiple of 12, like 60"),
        ({"op": "max", "collective": "broadcast"}, "broadcast does not reduce"),
    ],
)
def test_questions_nobody_can_answer(fields: dict[str, object], message: str) -> None:
    whole: dict[str, object] = {"collective": "all_reduce", "ranks": 3, "size_bytes": 48, **fields}
    with pytest.raises(ArgumentError, match=message):
        Question(**whole)  # type: ignore[arg-type]


def test_the_bus_factor_is_nccl_tests() -> None:
    factors = {
        collective: Question(collective=collective, ranks=4, size_bytes=64).bus_factor
        for collective in contract.COLLECTIVES
    }
    assert factors == {
        "all_reduce": 1.5,
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "broadcast": 1.0,
        "all_to_all": 0.75,
        "barrier": 0.0,
    }


@pytest.mark.parametrize(("field", "value"), [("alternations", 0), ("calls", 0), ("seconds", 0)])
def test_timing_nothing_is_refused(field: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=r"^0 (alternations|calls|seconds): want "):
        Manner(**{field: value})  # type: ignore[arg-type]


def test_buffers_larger_than_the_machine_are_refused() -> None:
    check_memory(Question(collective="all_reduce", ranks=2, size_bytes=64), 0)
    with pytest.raises(ArgumentError, match=r"64 ranks with 1024 GiB of buffers each need about .* GiB, this machine"):
        check_memory(Question(collective="all_reduce", ranks=64, size_bytes=64), 1 << 40)


def test_ranks_get_cores_of_their_own_or_none() -> None:
    one = cores_for(1)
    assert len(one) == 1
    assert cores_for(10_000) == ()


# ---- intervals ----


@pytest.mark.parametrize(
    ("n", "ends", "level"),
    [(1, (0, 0), 0.0), (5, (0, 4), 0.9375), (6, (0, 5), 0.96875), (7, (0, 6), 0.984375), (9, (1, 7), 0.9609375)],
)
def test_the_interval_is_that_of_the_order_statistics(n: int, ends: tuple[int, int], level: float) -> None:
    values = random.Random(1).sample(range(1000), n)  # noqa: S311 -- any order will do
    interval = median_interval(values)
    ordered = sorted(values)
    assert (interval.low, interval.high) == (ordered[ends[0]], ordered[ends[1]])
    assert interval.level == level
    assert interval.is_sure == (n >= 6)


@pytest.mark.parametrize("n", range(1, 14))
def test_the_level_counts_the_outcomes(n: int) -> None:
    """Each of n values is equally likely below or above the true median. Count the outcomes inside the interval."""
    interval = median_interval(list(range(n)))
    low, high = round(interval.low), round(interval.high)
    enclosed = sum(low < sum(sides) <= high for sides in itertools.product((0, 1), repeat=n))
    assert interval.level == pytest.approx(enclosed / 2**n)


def test_ratios_are_taken_within_an_alternation() -> None:
    interval = ratio_interval([2.0, 40.0, 6.0], [1.0, 10.0, 2.0])
    assert (interval.low, interval.middle, interval.high) == (2.0, 3.0, 4.0)
    with pytest.raises(ArgumentError, match="2 and 1 alternations"):
        ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(ArgumentError, match="no values: want at least 1 for a median"):
        median_interval([])


# ---- data ----


def case_of(**fields: object) -> contract.Case:
    whole: dict[str, object] = {
        "library": "numpy",
        "collective": "all_reduce",
        "dtype": "float32",
        "count": 2400,
        "out_dir": ".",
        **fields,
    }
    return contract.Case(**whole)  # type: ignore[arg-type]


REDUCTIONS: dict[str, Callable[[tuple[float, ...]], float]] = {
    "sum": sum,
    "average": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
    "product": math.prod,
}


@pytest.mark.parametrize("dtype", contract.DTYPES)
@pytest.mark.parametrize("op", contract.OPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_expected_reductions_are_exact(dtype: str, op: str, ranks: int) -> None:
    case = case_of(dtype=dtype, op=op)
    columns = list(zip(*(contract.inputs(case, rank, ranks).astype(float) for rank in range(ranks)), strict=True))
    want = [REDUCTIONS[op](values) for values in columns]
    got = contract.expected(case, 0, ranks)
    assert got.dtype.name == dtype
    assert got.astype(float).tolist() == want
    parts = [
        contract.expected(case_of(dtype=dtype, op=op, collective="reduce_scatter"), r, ranks) for r in range(ranks)
    ]
    assert reduce(lambda left, right: [*left, *right], [part.astype(float).tolist() for part in parts]) == want


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_expected_moves(ranks: int) -> None:
    gather = case_of(collective="all_gather")
    parts = [contract.inputs(gather, rank, ranks) for rank in range(ranks)]
    assert all(len(part) == 2400 // ranks for part in parts)
    assert contract.expected(gather, ranks - 1, ranks).tolist() == [each for part in parts for each in part]

    exchange = case_of(collective="all_to_all")
    sent = np.stack([contract.inputs(exchange, rank, ranks) for rank in range(ranks)]).reshape(ranks, ranks, -1)
    for rank in range(ranks):
        assert contract.expected(exchange, rank, ranks).tolist() == sent[:, rank].ravel().tolist()

    broadcast = case_of(collective="broadcast", root=ranks - 1)
    assert contract.expected(broadcast, 0, ranks).tolist() == contract.inputs(broadcast, ranks - 1, ranks).tolist()


def test_ranks_and_places_differ() -> None:
    case = case_of(count=1 << 16)
    first, second = (contract.inputs(case, rank, 2) for rank in range(2))
    assert (first != second).mean() > 0.5
    for distance in (1, 2, 1024, 4096, 1 << 15):
        assert (first[distance:] != first[:-distance]).mean() > 0.5


@pytest.mark.parametrize(("pool_bytes", "buffers"), [(0, 1), (9600, 1), (9601, 2), (96_000, 10)])
def test_the_pool_is_at_least_as_large_as_asked(pool_bytes: int, buffers: int) -> None:
    assert contract.num_buffers(case_of(pool_bytes=pool_bytes)) == buffers


def test_a_wrong_element_is_named_and_left_as_the_answer(tmp_path: Path) -> None:
    case = case_of(out_dir=str(tmp_path), library="liar")
    want = contract.expected(case, 1, 2)
    contract.verify(case, 1, want.copy(), want)
    got = want.copy()
    got[[7, 9]] += 1
    with pytest.raises(SystemExit, match=r"liar has a wrong result: all_reduce sum of 2400 float32, rank 1: 2 of 2400"):
        contract.verify(case, 1, got, want)
    assert f"the first is [7]: got {got[7]}, want {want[7]}" in (tmp_path / "rank-1.json").read_text()
    got = want.copy()
    got[3] = np.nan
    with pytest.raises(SystemExit, match=r"\[3\]: got nan"):
        contract.verify(case, 1, got, want)
    with pytest.raises(SystemExit, match=r"got float32 of shape \(2399,\), want float32 of shape \(2400,\)"):
        contract.verify(case, 1, want[1:], want)


def test_calls_rotate_and_are_warmed_up_on_every_buffer() -> None:
    made: list[int] = []
    marks: list[int] = []
    case = case_of(pool_bytes=9600 * 5, calls=7, warmup=3)
    seconds = contract.time_calls(made.append, lambda: marks.append(len(made)), case)
    assert marks == [5]  # one barrier, between warm-up and timing
    assert made == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert len(seconds) == 7
    assert min(seconds) >= 0


def test_every_buffer_is_verified_before_it_is_timed(tmp_path: Path) -> None:
    case = case_of(out_dir=str(tmp_path), pool_bytes=9600 * 3, calls=4)
    buffers = [(array, array) for array in np.empty((3, 2400), np.float32)]
    broken: list[int] = []

    def call(index: int) -> None:
        if index not in broken:
            buffers[index][0][:] += contract.inputs(case, 1, 2) if buffers[index][0].any() else 0

    assert len(contract.verify_and_time(case, (0, 2), buffers, call, lambda: None)) == 4
    assert not any(array.any() for array, _ in buffers)  # no operation changed the buffers during timing
    broken.append(2)
    with pytest.raises(SystemExit, match="wrong result"):
        contract.verify_and_time(case, (0, 2), buffers, call, lambda: None)


def test_cases_are_read_as_they_were_written(tmp_path: Path) -> None:
    cases = [case_of(cores=(0, 3), pool_bytes=5, root=1), case_of(count=7, out_dir=str(tmp_path))]
    contract.write_cases(cases, tmp_path / "cases.json")
    assert contract.read_cases(tmp_path / "cases.json") == cases


def test_a_case_that_is_refused_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    contract.write_cases([case_of(out_dir=str(folder)) for folder in folders], tmp_path / "cases.json")
    monkeypatch.setattr("sys.argv", ["worker.py", str(tmp_path / "cases.json")])

    def main(case: contract.Case) -> None:
        if case.out_dir == str(folders[1]):
            contract.refuse(case, 0, "not this one")
        contract.write_result(case, 0, [1.0], "1", {})

    contract.run_cases(main)
    left = [json.loads((folder / "rank-0.json").read_text()) for folder in folders]
    assert [answer.get("not_offered", "") for answer in left] == ["", "not this one", ""]
