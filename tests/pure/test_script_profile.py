"""Profiles of scripts: their file, and the steps that are predicted from them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multiring._cli import main
from multiring._gradients.buckets import GradientSpec, lay_out
from multiring._schedule import Collective, Wire
from multiring._simulator.presets import preset
from multiring._simulator.script_profile import (
    PartSeconds,
    ReadyGradient,
    ScriptProfile,
    script_profile_of,
    step_profile_of,
)
from multiring._simulator.step import part_of, step_of
from multiring.errors import ArgumentError
from multiring.planner import Task, cheapest
from multiring.planner.parallelism import Axis, GradientExchange, Parallelism, buckets_of, seconds_of

_MIB = 1 << 20
SECONDS = PartSeconds(
    step=0.1, step_low=0.09, step_high=0.12, input=0.004, other=0.006, forward=0.03, backward=0.05, optimizer=0.01
)
PROFILE = ScriptProfile(
    script="train.py",
    form="plain torch",
    model="Net",
    precision="float32",
    samples=32,
    backwards=1,
    steps=20,
    threads=2,
    seconds=SECONDS,
    bucket_bytes=4 * _MIB,
    peak_memory_bytes=300 * _MIB,
    gradients=(
        ReadyGradient("last", 2 * _MIB, 0.01),
        ReadyGradient("middle", 6 * _MIB, 0.04),
        ReadyGradient("first", _MIB, 0.045),
    ),
)


def test_a_file_gives_the_profile_back() -> None:
    assert script_profile_of(PROFILE.as_text()) == PROFILE
    beside = replace(PROFILE, copies=4, compute_s=(0.08,) * 19 + (0.1234,))
    assert script_profile_of(beside.as_text()) == beside
    # Profiles of earlier versions do not say it: they were measured on a rank alone.
    assert "compute_s" not in PROFILE.as_text()
    earlier = PROFILE.as_text().replace(',\n "copies": 1', "")
    assert "copies" not in earlier
    assert script_profile_of(earlier) == PROFILE


def test_the_step_is_priced_as_parallelize_prices_it() -> None:
    """Buckets start when their last gradient is ready, in order, and each takes what its plan takes."""
    cluster = part_of(preset("ddl").topology, 8)
    profile = step_profile_of([PROFILE], 8)
    step = step_of(profile, cluster)
    assert step.seconds == seconds_of(Parallelism(((Axis.DATA, 8),)), profile, cluster)
    assert profile.exchange == GradientExchange(bucket_bytes=4 * _MIB, at_most=True)
    assert [each.size_bytes for each in step.buckets] == [2 * _MIB, 6 * _MIB, _MIB]
    assert [each.ready_s for each in step.buckets] == pytest.approx([0.01, 0.04, 0.045])
    until = 0.0
    for bucket in step.buckets:
        task = Task(collective=Collective.ALL_REDUCE, size_bytes=bucket.size_bytes)
        until = max(until, bucket.ready_s) + cheapest(task, cluster).predicted_seconds
        assert bucket.end_s == pytest.approx(until)
    assert step.seconds.compute == pytest.approx(0.08)
    assert step.seconds.update == pytest.approx(0.01)
    assert step.seconds.outside == pytest.approx(0.01)
    assert step.seconds.exchange == pytest.approx(max(0.0, until - 0.05))
    one = step_of(step_profile_of([PROFILE], 1), part_of(cluster, 1))
    assert one.seconds.total == pytest.approx(0.1)
    assert (one.efficiency, list(one.buckets)) == (1.0, [])


def test_ranks_wait_for_the_slowest_of_them() -> None:
    """The slowest of N ranks whose steps vary independently: as a simulation with random steps says."""
    random = np.random.default_rng(7)
    spread = random.lognormal(0, 0.2, 1001)
    varied = replace(PROFILE, steps=1001, compute_s=tuple((0.08 * spread).tolist()))
    cluster = preset("ddl").topology
    steps = {ranks: step_of(step_profile_of([varied], ranks), part_of(cluster, ranks)) for ranks in (1, 2, 4, 64)}
    assert steps[1].seconds.waiting == 0
    for ranks, step in steps.items():
        alike = step_of(step_profile_of([PROFILE], ranks), part_of(cluster, ranks))
        assert alike.seconds.waiting == 0
        assert step.seconds == replace(alike.seconds, waiting=step.seconds.waiting)
        assert step.alone_s == pytest.approx(alike.alone_s)
        # The compute of each rank in 20,000 steps: the median of the slowest.
        drawn = random.choice(spread / np.median(spread), (20_000, ranks)).max(axis=1)
        slowest = step.seconds.compute + step.seconds.waiting
        assert slowest == pytest.approx(step.seconds.compute * np.median(drawn), rel=0.01)
        assert slowest <= step.seconds.compute * spread.max() / np.median(spread)
    waits = [steps[ranks].seconds.waiting for ranks in (1, 2, 4, 64)]
    assert waits == sorted(waits)
    assert steps[64].bound == "slower ranks"
    # With a lag, a rank that is late catches up while the others wait for nothing.
    later = step_of(step_profile_of([varied], 4, exchange=GradientExchange(lag=1)), part_of(cluster, 4))
    assert later.seconds.waiting == later.seconds.exchange == 0


def test_buckets_are_those_of_the_reducer() -> None:
    """A profile's buckets are cut as multiring lays them out, or as DistributedDataParallel's rule is."""
    random = np.random.default_rng(4)
    for _ in range(100):
        counts = (16 * random.integers(1, 1 << random.integers(1, 18, random.integers(1, 30)))).tolist()
        limit = int(random.integers(1 << 12, 8 << 20))
        gradients = tuple(ReadyGradient(f"{at}", 4 * count, 0.001 * at) for at, count in enumerate(counts))
        ours = replace(PROFILE, form="mt.distribute", bucket_bytes=limit, gradients=gradients)
        found = step_profile_of([ours], 2)
        layouts = lay_out([GradientSpec.row_major("float32", (count,)) for count in reversed(counts)], limit)
        sizes = [size for _, size in buckets_of(found.units, found.exchange)]
        assert sizes == [4 * each.flags_offset for each in layouts]
        ddp = step_profile_of([replace(ours, form="DistributedDataParallel")], 2)
        *full, _ = [size for _, size in buckets_of(ddp.units, ddp.exchange)]
        assert all(size >= min(limit, 1 << 20) for size in full)


def test_a_lag_gives_communication_the_whole_step() -> None:
    slow = replace(preset("fair").topology.rails[0], bandwidth_bytes_per_s=5e7)
    cluster = replace(part_of(preset("fair").topology, 16), rails=(slow,))
    at_once, later = (
        step_of(step_profile_of([PROFILE], 16, exchange=GradientExchange(lag=lag)), cluster) for lag in (0, 1)
    )
    assert later.communication_s == at_once.communication_s > 0.1
    assert later.seconds.total == pytest.approx(later.communication_s)
    assert at_once.seconds.total > later.seconds.total
    halved = step_of(step_profile_of([PROFILE], 16, exchange=GradientExchange(wire=Wire.BF16)), cluster)
    assert 0.4 < halved.communication_s / at_once.communication_s < 0.7


def test_batches_between_two_profiles_are_interpolated() -> None:
    twice = replace(PROFILE, samples=64, seconds=replace(SECONDS, step=0.16, forward=0.05, backward=0.09))
    step = step_of(step_profile_of([twice, PROFILE], 1, 48), part_of(preset("ddl").topology, 1))
    assert step.seconds.compute == pytest.approx(0.04 + 0.07)
    assert step.batch == 48
    with pytest.raises(ArgumentError, match="2 profiles with different batches: say which batch"):
        step_profile_of([PROFILE, twice], 1)
    with pytest.raises(ArgumentError, match="want one model with different batches"):
        step_profile_of([PROFILE, replace(twice, gradients=PROFILE.gradients[:2])], 1, 48)


def test_the_command_predicts_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    file.write_text(PROFILE.as_text())
    assert main(["simulate", "--topology", "ddl", "--profile", str(file), "--ranks", "1,8"]) == 0
    said = capsys.readouterr().out
    assert "Net of train.py, 32 samples a rank" in said
    assert "Measured on one rank (plain torch, float32, 2 threads)" in said
    assert main(["simulate", "--topology", "ddl", "--profile", str(file), "--ranks", "8", "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["step_s"] == step_of(step_profile_of([PROFILE], 8), part_of(preset("ddl").topology, 8)).seconds.total
    assert len(step["buckets"]) == 3


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"samples": 32', '"samples": 0', "line 7, field samples: 0: want a whole number, 1 or more"),
        ('"forward": 0.03', '"forward": -0.03', "line 17, field seconds.forward: -0.03: want a number, 0 or more"),
        ('"backward": 0.05', '"backward": 0', "line 18, field seconds.backward: 0: want a number above 0"),
        ('"threads": 2', '"threads": 2, "speed": 1', "field speed: unknown: want script, form, model"),
        ('"model": "Net",', "", "the file lacks model"),
        ('"copies": 1', '"copies": 0', "line 23, field copies: 0: want a whole number, 1 or more"),
        ('"bytes": 6291456', '"bytes": "6 MiB"', 'line 26, field gradients[1].bytes: "6 MiB": want a whole number'),
        (
            '"ready_s": 0.045',
            '"ready_s": 0.03',
            "line 27, field gradients[2].ready_s: 0.03 is before the gradient above",
        ),
        ('"ready_s": 0.045', '"ready_s": NaN', "line 27: NaN: want a finite number"),
        ('"copies": 1', '"copies": 1, "compute_s": [0.1]', "field compute_s: 1 numbers: want one for each of the 20"),
        ('"copies": 1', f'"copies": 1, "compute_s": {[0.1] * 19 + [0]}', "line 23, field compute_s[19]: 0: want a num"),
        ('"copies": 1', '"copies": 1, "compute_s": 0.1', "line 23, field compute_s: 0.1: want a list"),
        ('"samples": 32', '"samples": 32, "samples": 64', "line 7: the field 'samples' is there twice"),
        ('"multiring_profile": 1', '"multiring_profile": 9', "line 2, field multiring_profile: want 1"),
        ('"multiring_profile": 1', '"profile": 1', 'not a profile: no field "multiring_profile"'),
        ('"samples": 32', '"samples": 32,,', "line 7: Expecting property name"),
    ],
)
def test_a_wrong_file_is_refused(
    before: str, after: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PROFILE.as_text()
    assert text.count(before) == 1
    file = tmp_path / "profile.json"
    file.write_text(text.replace(before, after))
    assert main(["simulate", "--topology", "ddl", "--profile", str(file)]) == 2
    assert reason in capsys.readouterr().err


def test_profiles_exclude_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--topology", "ddl", "--profile", "x", "--model", "vgg16"]) == 2
    assert "--profile has the script's own times: leave out --model" in capsys.readouterr().err
    assert main(["simulate", "--topology", "ddl", "--profile", str(tmp_path)]) == 2
    assert "want a file of multiring profile" in capsys.readouterr().err
