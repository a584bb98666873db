"""benchmarks/promises/torch_backend.py and ddp_exposed.py: valid commands for the bench, and verdicts from records."""

import argparse
import shlex
from typing import Any

import pytest
from benchmarks.promises import ddp_exposed, floors, floors_hosts, torch_backend
from benchmarks.promises.floors import MIB, Record, Verdict

from multiring._bench.peers import PEERS
from multiring._bench.step import OTHERS
from multiring._bench.step import PEERS as TRAINERS
from multiring._bench.workers.step_case import NETWORKS
from multiring._cli import bench, bench_step

LINES = {line.name: line for line in torch_backend.LINES}


def judged(name: str, *records: Record) -> list[Verdict]:
    return list(LINES[name].judge(list(records)))


def collective(library: str, seconds: float, name: str) -> Record:
    common: dict[str, Any] = {"library": library, "collective": name, "size_bytes": 8 * MIB}
    return {**common, "seconds": [seconds, 2 * seconds, seconds], "median_s": seconds}


def step(library: str, seconds: float) -> Record:
    return {"library": library, "median_step_s": seconds, "seconds": [seconds] * 3}


@pytest.mark.parametrize("name", LINES)
def test_the_bench_takes_the_commands(name: str) -> None:
    for command in LINES[name].commands:
        first, *words = shlex.split(command)
        parser = argparse.ArgumentParser()
        if first == "step":
            bench_step.add_arguments(parser)
            taken = parser.parse_args(words)
            assert set(taken.against.split(",")) <= {*TRAINERS, *OTHERS}
            assert set(taken.networks.split(",")) <= set(NETWORKS)
        else:
            bench.add_arguments(parser)
            taken = parser.parse_args([first, *words])
            assert set(taken.against.split(",")) <= set(PEERS)
        assert taken.alternations >= 6


def test_the_records_of_no_two_lines_are_kept_in_one_file() -> None:
    names = [line.name for line in (*floors.LINES, *floors_hosts.LINES, *torch_backend.LINES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("gloo_s", "holds"), [(4.0, True), (3.9, False)])
def test_collectives_are_four_times_as_fast(gloo_s: float, *, holds: bool) -> None:
    figures = (("multiring", 0.9), ("gloo", gloo_s), ("multiring-torch", 1.0))
    names = ("reduce_scatter", "all_gather")
    verdicts = judged("collectives", *(collective(*each, name) for name in names for each in figures))
    assert [verdict.holds for verdict in verdicts] == [holds, holds]


@pytest.mark.parametrize(("exposed_s", "holds"), [(0.029, True), (0.031, False), (-0.01, True)])
def test_a_third_of_what_gloo_exposes(exposed_s: float, capsys: pytest.CaptureFixture[str], *, holds: bool) -> None:
    # The machine slows down from round to round.
    rounds = [
        dict(
            zip(
                ddp_exposed.NAMES,
                (silent - 0.02, silent, silent + 0.09, silent + 0.01, silent + exposed_s),
                strict=True,
            )
        )
        for silent in (0.6, 0.9, 1.3)
    ]
    assert ddp_exposed.judged(rounds) is holds
    printed = capsys.readouterr().out
    assert "       multiring: 0.11 of Gloo's" in printed
    assert "exposed   90.0 ms [90.0, 90.0], more than alone  110.0 ms" in printed
    assert ("MISSED multiring, allreduce_hook" not in printed) is holds


@pytest.mark.parametrize(("seconds", "holds"), [(1.0, True), (1.01, False)])
def test_sharded_steps(seconds: float, *, holds: bool) -> None:
    sharded = judged("fsdp", step("fsdp", 1.5), step("fsdp-multiring", 0.9), step("fsdp-multiring-arena", seconds))
    assert [verdict.holds for verdict in sharded] == [True, holds]


@pytest.mark.parametrize(("seconds", "holds"), [(1.0, True), (1.03, True), (1.04, False)])
def test_steps_between_hosts(seconds: float, *, holds: bool) -> None:
    both = judged("lab-ddp", step("ddp", 1.0), step("ddp-multiring", seconds), step("ddp-multiring-hook", 0.9))
    assert [verdict.holds for verdict in both] == [holds, True]
