"""multiring simulate: steps of known models on clusters."""

import json

import pytest

from multiring._cli import main
from multiring._schedule import Collective
from multiring._simulator.layers import layers_of, units_of
from multiring._simulator.presets import preset
from multiring._simulator.step import part_of, profile_of, step_of
from multiring.planner import Task, cheapest
from multiring.planner.parallelism import Axis, Parallelism, buckets_of, seconds_of

STEP = ["simulate", "--topology", "horovod", "--model", "vgg16", "--batch-per-rank", "64"]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnet152", 60_192_808), ("vgg16", 138_357_544)],
)
def test_models_have_the_parameters_of_their_papers(model: str, parameters: int) -> None:
    assert sum(sum(layer.parameters) for layer in layers_of(model)) == parameters


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
        (["--model", "deeplab"], "no model 'deeplab': want one of resnet101, resnet152, resnet50, vgg16"),
        (["--topology", "sumit"], "no topology 'sumit': want a file, or one of ddl"),
        (["--ranks", "many"], "--ranks many: want numbers of ranks"),
        (["--ranks", "513"], "513 ranks of a cluster of 512: want 1 to 512"),
        (["--ranks", "2", "--sweep"], "--sweep and --ranks 2 both say how many ranks"),
        (["--batch-per-rank", "5"], "no published rate of one P100-PCIE for vgg16 with a batch of 5 (known: resnet101"),
        (["--batch-per-rank", "0", "--rate", "5"], "a batch of 0 at 5 samples/s: want both above 0"),
        (["--rate", "-1"], "at -1 samples/s: want both above 0"),
    ],
)
def test_wrong_input_is_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, *words]) == 2
    assert reason in capsys.readouterr().err
