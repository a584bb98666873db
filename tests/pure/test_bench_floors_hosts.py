"""benchmarks/promises/floors_hosts.py: its commands are valid for the bench, and its verdicts follow from records."""

import argparse
import shlex
from typing import Any

import pytest
from benchmarks.promises import floors, floors_hosts
from benchmarks.promises.floors import KEPT, MIB, Line, Record, Verdict

from multiring._bench.peers import PEERS
from multiring._bench.variants import VARIANTS
from multiring._cli import bench

LINES = {line.name: line for line in floors_hosts.LINES}


def record(library: str, size_bytes: int, *seconds: float, **fields: Any) -> Record:
    middle = sorted(seconds)[len(seconds) // 2]
    own = {"library": library, "size_bytes": size_bytes, "seconds": list(seconds), "median_s": middle}
    return {**own, "algbw_bytes_per_s": size_bytes / middle, "bound_bytes_per_s": 1e8, "bound_formula": "why", **fields}


def judged(name: str, *records: Record) -> list[Verdict]:
    return list(LINES[name].judge(list(records)))


@pytest.mark.parametrize("name", LINES)
def test_the_bench_takes_the_commands(name: str) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    for command in LINES[name].commands:
        taken = parser.parse_args(shlex.split(command))
        assert taken.hosts > 1
        assert set(taken.against.split(",")) <= {*PEERS, *VARIANTS, "none"}
        assert taken.alternations >= 6 or LINES[name].optional


def test_the_records_of_no_two_lines_are_kept_in_one_file() -> None:
    names = [line.name for line in (*floors.LINES, *floors_hosts.LINES)]
    assert len({KEPT / name for name in names}) == len(names)


def test_a_share_is_the_median_of_the_alternations_with_the_bounds_formula() -> None:
    size = 32 * MIB
    held, _ = judged(
        "two", record("multiring", size, size / 91e6, size / 92e6, size / 99e6), record("gloo", size, 1, 1, 1)
    )
    assert held.holds
    assert held.figure == "92.0% [91.0%, 99.0%], 92.0 MB/s; why"
    missed, _ = judged("two", record("multiring", size, size / 91e6), record("gloo", size, 1))
    assert not missed.holds


@pytest.mark.parametrize(("gloo_s", "holds"), [(1.01, True), (1.0, False), (0.9, False)])
def test_faster_is_more_than_as_fast(gloo_s: float, *, holds: bool) -> None:
    size = 8 * MIB
    verdicts = judged(
        "four-8", *(record(name, size, each) for name, each in (("multiring", 1.0), ("gloo", gloo_s), ("mpich", 1.7)))
    )
    assert [verdict.holds for verdict in verdicts[1:]] == [holds, True]


def test_ratios_are_taken_within_an_alternation() -> None:
    size = 32 * MIB
    ours, half, quarter = (
        record(name, size, 4 / by, 8 / by, 6 / by)
        for name, by in (("multiring", 1), ("multiring-bf16", 2), ("multiring-int8", 4))
    )
    bf16, int8 = judged("wires", ours, half, quarter)
    assert (bf16.figure, int8.figure) == ("2.00 x [2.00, 2.00]", "4.00 x [4.00, 4.00]")


def test_not_slower_than_the_best_peer() -> None:
    size = 8 * MIB
    peers = [record("gloo", size, 2.0), record("mpich", size, 1.0), record("openmpi", size, 3.0)]
    (verdict,) = judged("unshaped-8", record("multiring", size, 1.0), *peers)
    assert verdict.holds
    assert "1.00 x mpich" in verdict.figure


def test_what_only_is_told_has_no_floor() -> None:
    size = 8 * MIB
    _, told = judged(
        "mpi-8", record("multiring", size, 2.0), record("multiring-mpi", size, 1.0), record("mpich", size, 9.0)
    )
    assert (told.holds, told.floor) == (True, "none")
    (line,) = judged("openmpi", record("openmpi", size, 4.0, version="5", settings={}))
    assert line.holds


def test_an_optional_line_is_only_run_where_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (Line("usual", ("barrier",), lambda _: ()), Line("rare", ("barrier",), lambda _: (), optional=True))
    monkeypatch.setattr("sys.argv", ["floors", "--list"])
    assert floors.main(lines, "text") == 0
    assert "rare" not in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["floors", "--list", "--only", "rare"])
    assert floors.main(lines, "text") == 0
    assert capsys.readouterr().out == "rare\n  multiring bench barrier\n"
