"""multiring simulate: steps of known models on clusters."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from multiring._cli import main
from multiring._schedule import Collective, Wire
from multiring._simulator.layers import layers_of, units_of
from multiring._simulator.presets import preset
from multiring._simulator.step import part_of, profile_of, step_of
from multiring.planner import Task, cheapest
from multiring.planner.parallelism import Axis, GradientExchange, Parallelism, buckets_of, seconds_of

STEP = ["simulate", "--topology", "horovod", "--model", "vgg16", "--batch-per-rank", "64"]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("deeplabv3plus", 43_669_251),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("vgg16", 138_357_544),
    ],
)
def test_models_have_the_parameters_of_their_papers(model: str, parameters: int) -> None:
    assert sum(sum(layer.parameters) for layer in layers_of(model)) == parameters


def test_deeplabv3plus_has_the_arithmetic_of_its_log() -> None:
    # The log counts 115.282 TF for the steps of 8 ranks, forward and backward, and transposed convolutions otherwise.
    multiplications = sum(layer.multiplications for layer in layers_of("deeplabv3plus"))
    assert 6e-12 * multiplications == pytest.approx(115.282 / 8, rel=0.1)


def test_the_exascale_command_predicts_from_a_rate_with_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "simulate",
        "--topology",
        "summit",
        "--model",
        "deeplabv3plus",
        "--batch-per-rank",
        "1",
        "--ranks",
        "6,24",
    ]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "climseg-cgpu-513075.out" in found["source_of_rate"]
    assert [step["forward_s"] + step["backward_s"] for step in found["steps"]] == pytest.approx([0.854, 0.854])


def test_a_step_and_a_plan_give_one_number() -> None:
    cluster = part_of(preset("ddl").topology, 8)
    profile = profile_of(units_of(layers_of("resnet50")), 32, 195, 8)
    step = step_of(profile, cluster)
    assert step.seconds == seconds_of(Parallelism(((Axis.DATA, 8),)), profile, cluster)
    sizes = [-(-size_bytes // 64) * 64 for _, size_bytes in buckets_of(profile.units)]
    plans = [cheapest(Task(collective=Collective.ALL_REDUCE, size_bytes=size), cluster) for size in sizes]
    assert step.communication_s == pytest.approx(sum(plan.predicted_seconds for plan in plans), rel=1e-12)
    assert step.samples_per_s == pytest.approx(8 * 195 * step.efficiency)


def test_steps_are_printed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "--ranks", "1,8"]) == 0
    said = capsys.readouterr().out
    assert "100.0%" in said
    assert "One rank alone: 130.9 samples/s (Horovod's README" in said
    assert main([*STEP, "--ranks", "1,8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, eight = found["steps"]
    assert (one["ranks"], one["efficiency"], one["communication_s"]) == (1, 1, 0)
    assert eight["hosts"] == 2
    assert eight["communication_s"] > eight["exposed_s"] > 0
    assert found["sources_of_topology"]["hosts.slots"].startswith("128 servers")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "deeplab"], "no model 'deeplab': want one of deeplabv3plus, resnet101, resnet152, resnet50"),
        (["--topology", "sumit"], "no topology 'sumit': want a file, or one of ddl"),
        (["--ranks", "many"], "--ranks many: want numbers of ranks"),
        (["--ranks", "8,0"], "--ranks 8,0: want numbers of ranks"),
        (["--ranks", "513"], "513 ranks of a cluster of 512: want 1 to 512"),
        (["--ranks", "2", "--sweep", "ranks=2"], "--sweep ranks= and --ranks both say the same"),
        (["--sweep", "speed=2"], "--sweep speed=2: want NAME=V1,V2,... with a NAME of ranks, batch, wire"),
        (["--sweep", "ranks=2", "--sweep", "ranks=4"], "--sweep ranks= is given twice: want all values in one list"),
        (["--sweep", "ranks=2,4,2"], "--sweep ranks=2,4,2: one value is there twice"),
        (["--sweep", "ranks=2,two"], "--sweep ranks=2,two: want numbers of ranks"),
        (["--sweep", "wire=int4"], "--sweep wire=int4: wire='int4': want one of"),
        (["--sweep", "lag=2"], "--sweep lag=2: '2': want 0 or 1"),
        (["--sweep", "bucket=0"], "buckets of 0 bytes with a lag of 0: want 1 byte or more"),
        (["--sweep", "nic=-1gbit"], "--sweep nic=-1gbit: '-1gbit' is not a rate"),
        (["--noise-scale", "2000"], "no --sweep and --noise-scale: they compare the points of a sweep"),
        (["--sweep", "lag=0", "--noise-scale", "nan"], "--noise-scale nan: want a number above 0"),
        (["--sweep", "lag=0", "--least-samples", "9"], "--least-samples needs --noise-scale"),
        (["--batch-per-rank", "5"], "no published rate of one P100-PCIE for vgg16 with a batch of 5 (known: resnet101"),
        (["--batch-per-rank", "0", "--rate", "5"], "--batch-per-rank 0: want a whole number, 1 to"),
        (["--rate", "-1"], "--rate -1: want a number above 0"),
    ],
)
def test_wrong_input_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_of_links_alone_is_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a file is valid for any hosts, and would silently be a cluster of one rank."""
    file = tmp_path / "links.toml"
    for text in ("", "[shm]\nlatency_us = 1"):
        file.write_text(text)
        assert main(["simulate", "--topology", str(file), *STEP[3:], "--rate", "5"]) == 2
        assert f"--topology {file} names no hosts, so the size of the cluster is unknown" in capsys.readouterr().err


def test_a_sweep_gives_the_numbers_of_single_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    """Every combination is there once, with the step that the same function gives."""
    swept = ["--sweep", "ranks=1,8,64", "--sweep", "batch=32,64", "--sweep", "wire=none,bf16", "--sweep", "lag=0,1"]
    law = ["--noise-scale", "2000", "--least-samples", "1e7"]
    command = ["simulate", "--topology", "p5", "--model", "vgg16", "--rate", "2000", *swept, *law]
    assert main([*command, "--sweep", "bucket=4MiB,25MiB", "--sweep", "nic=10gbit,3200gbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    points, units = found["points"], units_of(layers_of("vgg16"))
    settings = [
        tuple(each[name] for name in ("ranks", "batch_per_rank", "wire", "lag", "bucket_bytes", "nic_bytes_per_s"))
        for each in points
    ]
    assert len(set(settings)) == len(points) == 3 * 2 * 2 * 2 * 2 * 2
    for each, (ranks, batch, wire, lag, bucket, nic) in zip(points, settings, strict=True):
        cluster = preset("p5").topology
        rails = tuple(replace(rail, bandwidth_bytes_per_s=nic) for rail in cluster.rails)
        exchange = GradientExchange(wire=Wire[wire.upper()], lag=lag, bucket_bytes=bucket)
        profile = profile_of(units, batch, 2000, ranks, exchange)
        step = step_of(profile, part_of(replace(cluster, rails=rails), ranks))
        assert (each["step_s"], each["efficiency"]) == (step.seconds.total, step.efficiency)
        hours = 1e7 * (1 + ranks * batch / 2000) / step.samples_per_s / 3600
        assert each["hours_to_accuracy"] == (None if lag or wire != "none" else pytest.approx(hours))
    best = found["best"]
    assert points[best["shortest step"]]["step_s"] == min(each["step_s"] for each in points)
    assert points[best["most samples a second"]]["samples_per_s"] == max(each["samples_per_s"] for each in points)
    timed = [each for each in points if each["hours_to_accuracy"] is not None]
    assert points[best["shortest time to the accuracy"]] == min(timed, key=lambda each: each["hours_to_accuracy"])
    assert points[best["lowest price of the accuracy"]] == min(timed, key=lambda each: each["usd_to_accuracy"])


def test_the_table_of_a_sweep_names_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*STEP, "--ranks", "powers", "--sweep", "lag=0,1", "--sweep", "nic=1gbit", "--noise-scale", "300"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[2:22]]
    assert [(row[0], row[3]) for row in rows] == [(str(1 << bits), lag) for bits in range(10) for lag in "01"]
    relative = [float(row[-1]) for row in rows if row[3] == "0"]
    assert min(relative) == 1
    best = 1 << relative.index(1)
    (said,) = (line for line in lines if line.startswith("Shortest time to the accuracy: "))
    # Above the noise scale more ranks need more samples, and a slow link has no time left to give.
    assert best < 512
    assert f": {best} ranks, batch 64, wire none, lag 0" in said
    assert "such points have no time to it" in lines[-1]
