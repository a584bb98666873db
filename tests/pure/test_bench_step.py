"""`multiring bench step`: its evaluation of measurements and its errors, without torch or processes."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiring._bench.job import JobCommand, Jobs
from multiring._bench.records import Circumstances, settings_lines
from multiring._bench.step import StepBench, StepComparison, StepManner, StepQuestion, StepTiming, check_step_memory
from multiring._bench.step_records import step_lines, step_records, why_steps_not_publishable
from multiring._bench.workers.step_case import NETWORKS, FileRendezvous, Pace

CIRCUMSTANCES = Circumstances(hardware="a machine", commit="abc", command="multiring bench step", ping_pong_us=5.0)
# Six alternations. The libraries' medians are 1.02, 1.5 and 1.0.
SLOWER = [0.01, 0.02, 0.02, 0.02, 0.02, 0.05]
OTHER_QUIET, OTHER_BUSY = 0.01, 0.4


def comparison(*, other_cores: float = OTHER_QUIET, alternations: int = 6, ddp: bool = True) -> StepComparison:
    timings = [
        StepTiming("multiring", [1 + more for more in SLOWER[:alternations]], "multiring 1", {}),
        StepTiming("ddp", [1.5] * alternations, "torch 2", {"static_graph": "True"}),
        StepTiming("independent", [1.0] * alternations, "torch 2", {}),
    ]
    return StepComparison(
        question=StepQuestion(network="resnet50"),
        manner=StepManner(alternations=alternations),
        timings=tuple(timing for timing in timings if ddp or timing.library != "ddp"),
        other_cores=other_cores,
    )


def test_figures_are_medians_over_alternations() -> None:
    ours, ddp, alone = step_records(comparison(), CIRCUMSTANCES)
    assert ours["median_step_s"] == pytest.approx(1.02)
    assert ours["exposed_s"] == pytest.approx(0.02)
    assert ours["exposed_interval"] == pytest.approx([0.01, 0.05])
    assert ours["ratio"] == pytest.approx(1 / 1.02)
    assert ours["interval"] == pytest.approx([1 / 1.05, 1 / 1.01])
    assert ours["exposed_share"] == pytest.approx(0.02 / 1.02)
    assert ours["ddp_ratio"] == pytest.approx(1.5 / 1.02)
    assert (ddp["exposed_s"], ddp["ratio"], ddp["ddp_ratio"]) == (0.5, pytest.approx(1 / 1.5), 1.0)
    assert (alone["exposed_s"], alone["ratio"]) == (0.0, 1.0)
    assert ours["level"] >= 0.95


def test_a_record_has_what_is_promised() -> None:
    wanted: dict[str, Any] = {
        "network": "resnet50",
        "library": "ddp",
        "ranks": 2,
        "hosts": 1,
        "threads": 1,
        "batch": 4,
        "image_size": 224,
        "dtype": "bfloat16",
        "parameters": 25_557_032,
        "gradient_bytes": 102_228_128,
        "median_step_s": 1.5,
        "verified": True,
        "hardware": "a machine",
        "commit": "abc",
        "command": "multiring bench step",
        "publishable": True,
        "settings": {"static_graph": "True"},
    }
    record = json.loads(json.dumps(step_records(comparison(), CIRCUMSTANCES)[1]))
    assert {name: record[name] for name in wanted} == wanted
    assert {"exposed_s", "ratio", "interval", "date"} <= record.keys()


def test_without_ddp_nothing_is_held_against_it() -> None:
    ours, _ = step_records(comparison(ddp=False), CIRCUMSTANCES)
    assert (ours["ddp_ratio"], ours["ddp_interval"]) == (None, None)
    assert not any("ddp" in line for line in step_lines(comparison(ddp=False)))


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, []),
        ({"other_cores": OTHER_BUSY}, ["other work took 40% of a core, more than 5%"]),
        ({"alternations": 5}, ["5 alternations give no 95 % interval, want at least 6"]),
    ],
)
def test_what_may_be_published(fields: dict[str, Any], reasons: list[str]) -> None:
    made = comparison(**fields)
    assert why_steps_not_publishable(made) == reasons
    assert all(record["publishable"] is not bool(reasons) for record in step_records(made, CIRCUMSTANCES))
    assert [line for line in step_lines(made) if "not publishable" in line] == [
        f"  not publishable: {reason}" for reason in reasons
    ]


def test_the_table_has_milliseconds_and_shares() -> None:
    lines = step_lines(comparison())
    assert lines[0] == "resnet50, 4 samples of 224 pixels a rank, bfloat16, 2 ranks x 1 threads, 102.2 MB of gradients"
    assert lines[2].split() == [
        *("multiring", "1020.0", "ms", "[1010.0,", "1050.0]", "20.0", "ms", "[10.0,", "50.0]", "2.0%"),
        *("0.980", "[0.952,", "0.990]"),
    ]
    assert lines[4].split() == ["independent", "1000.0", "ms", "[1000.0,", "1000.0]"]
    assert lines[5] == "  ddp / multiring: 1.471 [1.429, 1.485]"
    assert settings_lines(comparison().timings)[1] == "  ddp: torch 2; static_graph=True"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": "alexnet"}, "unknown network 'alexnet', want one of resnet50, vgg16, embedding"),
        ({"dtype": "float16"}, "unknown type 'float16', want one of bfloat16, float32"),
        ({"ranks": 1}, "ranks 1: want at least 2"),
        ({"device": "tpu"}, "unknown device 'tpu', want one of cpu, cuda"),
        ({"threads": 0}, "threads 0: want at least 1"),
        ({"batch": 0}, "batch 0: want at least 1"),
        ({"image_size": 63}, "image size 63: want at least 64"),
    ],
)
def test_questions_nobody_can_answer(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepQuestion(**{"network": "resnet50", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alternations": 0}, "0 alternations of 10 steps: want at least 1"),
        ({"steps": 0}, "7 alternations of 0 steps: want at least 1"),
        ({"warmup": -1}, "-1 steps of warm-up"),
    ],
)
def test_timing_nothing_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepManner(**fields)


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="'horovod' is not a library of this bench, want one of ddp"):
        StepBench(Jobs(1.0), StepManner(), ["horovod"])


def test_who_takes_part_always_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Jobs, "run_for", lambda *_: [{"seconds": [1.0], "version": "1", "settings": {}}])
    with Jobs(10.0) as jobs:
        bench = StepBench(jobs, StepManner(alternations=1), ["fsdp"], leave_out=["multiring", "independent"])
        made = bench.compare(StepQuestion(network="transformer"))
    assert [timing.library for timing in made.timings] == ["fsdp"]
    assert made.exposed_s("fsdp") is None
    assert step_records(made, CIRCUMSTANCES)[0]["exposed_s"] is None
    assert step_lines(made)[2].split() == ["fsdp", "1000.0", "ms", "[1000.0,", "1000.0]"]


def test_leaving_out_a_peer_or_everybody_is_refused() -> None:
    with pytest.raises(ValueError, match="'ddp' cannot be left out, want multiring or independent"):
        StepBench(Jobs(1.0), StepManner(), leave_out=["ddp"])
    with pytest.raises(ValueError, match="no library is left to time without multiring and independent"):
        StepBench(Jobs(1.0), StepManner(), [], leave_out=["multiring", "independent"])


def test_ranks_larger_than_the_machine_are_refused() -> None:
    check_step_memory(StepQuestion(network="embedding"))
    with pytest.raises(
        ValueError, match=r"4096 ranks of vgg16 need more than 10555\.8 GiB, this machine has .*: want few"
    ):
        check_step_memory(StepQuestion(network="vgg16", ranks=4096))


def test_emulated_compute_is_said() -> None:
    pace = Pace(forward_s=0.1, backward=(("weight", 0.05), ("bias", 0.0)), optimizer_s=0.01)
    made = replace(comparison(), pace=pace)
    assert step_records(comparison(), CIRCUMSTANCES)[0]["emulated_compute_s"] is None
    assert step_records(made, CIRCUMSTANCES)[0]["emulated_compute_s"] == pytest.approx(0.16)
    assert step_lines(made)[1] == "  compute is emulated: ranks sleep for the 160.0 ms of one rank alone"


def test_a_wire_type_is_timed_beside_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run_for(_: Jobs, title: str, start: JobCommand, *_rest: Any) -> list[dict[str, Any]]:
        case = json.loads(Path(start.command[-1]).read_text())
        seen.append((case["library"], case["wire"]))
        assert start.command[0] == "lab"
        return [{"seconds": [1.0], "version": title, "settings": {}}]

    monkeypatch.setattr(Jobs, "run_for", run_for)
    with Jobs(10.0) as jobs:
        bench = StepBench(jobs, StepManner(alternations=1), ["ddp", "multiring-bf16"], launcher=("lab",))
        made = bench.compare(StepQuestion(network="resnet50", ranks=4, hosts=4))
    assert [timing.library for timing in made.timings] == ["multiring", "ddp", "multiring-bf16", "independent"]
    assert seen == [("multiring", ""), ("ddp", ""), ("multiring", "bf16"), ("independent", "")]


def test_a_library_that_cannot_run_here_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asked: list[tuple[str, int]] = []

    def run_for(_: Jobs, title: str, start: JobCommand, _answers: Any, ranks: int) -> list[dict[str, Any]]:
        library = title.rpartition(" ")[2]
        asked.append((library, ranks))
        assert start.command[start.command.index("-n") + 1] == str(ranks)
        if library == "ddp-nccl":
            return [{"wrong": "", "not_run": "2 ranks share 1 GPU"}] * ranks
        seconds = {"multiring": 3.0, "alone": 1.0, "independent": 2.0}[library]
        return [{"wrong": "", "seconds": [seconds], "version": "1", "settings": {}}] * ranks

    monkeypatch.setattr(Jobs, "run_for", run_for)
    with Jobs(10.0) as jobs:
        bench = StepBench(jobs, StepManner(alternations=2), ["ddp-nccl", "alone"])
        made = bench.compare(StepQuestion(network="resnet50", device="cuda"))
    once = [("multiring", 2), ("ddp-nccl", 2), ("alone", 1), ("independent", 2)]
    assert asked == [*once, ("independent", 2), ("alone", 1), ("multiring", 2)]
    lines = step_lines(made)
    assert "2 ranks on cuda" in lines[0]
    assert "  ddp-nccl: NOT RUN: 2 ranks share 1 GPU" in lines
    assert "  multiring / alone: 3.000 [3.000, 3.000]" in lines
    record = step_records(made, CIRCUMSTANCES)[1]
    assert (record["library"], record["not_run"], record["verified"]) == ("ddp-nccl", "2 ranks share 1 GPU", False)
    assert made.exposed_s("ddp-nccl") is None


def test_a_device_is_not_for_shards_or_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Jobs(10.0) as jobs:
        sharding, plain = StepBench(jobs, StepManner(), ["fsdp"]), StepBench(jobs, StepManner())
        with pytest.raises(ValueError, match="--device cuda is not for fsdp: leave it out"):
            sharding.compare(StepQuestion(network="transformer", device="cuda"))
        with pytest.raises(ValueError, match="--device cuda is not for --emulate: leave it out"):
            plain.compare(StepQuestion(network="resnet50", device="cuda", is_emulated=True))


def test_a_batch_that_nobody_names_is_the_networks() -> None:
    assert {network: StepQuestion(network=network).samples for network in NETWORKS} == {
        "resnet50": 4,
        "vgg16": 4,
        "embedding": 512,
        "transformer": 2,
    }
    assert StepQuestion(network="embedding", batch=3).samples == 3


def test_ranks_hear_each_other(tmp_path: Path) -> None:
    first, second = (FileRendezvous(tmp_path, rank, 2) for rank in range(2))
    first.tell("x", 1)
    assert not first.is_told("x")
    other = threading.Thread(target=lambda: second.tell("x", {"a": [2]}))
    other.start()
    assert first.hear("x") == [1, {"a": [2]}]
    other.join()
    assert second.hear("x") == [1, {"a": [2]}]
