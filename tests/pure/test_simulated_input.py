"""multiring simulate: how fast the workers of a rank make its samples, and steps that wait for them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.pure.test_script_profile import PROFILE

from multiring._cli import main
from multiring._simulator.changes import changes_of
from multiring._simulator.measured_feeding import MeasuredFeeding, measured_feeding_of
from multiring._simulator.presets import preset
from multiring._simulator.script_profile import script_profile_of, step_profile_of
from multiring._simulator.step import part_of, step_of
from multiring._topology import Link, Rack, Topology
from multiring.data.stages import working_s
from multiring.errors import ArgumentError
from multiring.planner.parallelism import Feeding, input_time
from multiring.planner.staging import each_for_itself, site_of

FED = MeasuredFeeding(workers=2, worker_s=0.004, cpu_s=0.003, sample_bytes=1e5)
STEP = ["simulate", "--topology", "horovod", "--model", "vgg16", "--batch-per-rank", "64", "--ranks"]


def link(bytes_per_s: float) -> Link:
    return Link(latency_s=0.0, overhead_s=0.0, bandwidth_bytes_per_s=bytes_per_s, reduce_bytes_per_s=1e9)


def cluster(random: np.random.Generator) -> Topology:
    """Return a cluster with different numbers of ranks on its hosts, and racks with uplinks or without."""
    sizes = random.integers(1, 9, int(random.integers(1, 9))).tolist()
    ends = np.cumsum([0, *sizes]).tolist()
    hosts = tuple(tuple(range(begin, end)) for begin, end in pairwise(ends))
    rails = (link(float(random.uniform(1e7, 1e9))),)
    cut = int(random.integers(0, len(hosts)))
    if not cut:
        return Topology(hosts, rails=rails)
    uplink = link(float(random.uniform(1e7, 1e9)))
    inside, outside = tuple(range(cut)), tuple(range(cut, len(hosts)))
    racks = Rack(hosts=inside, uplinks=(uplink,)), Rack(hosts=outside, uplinks=() if cut % 2 else (uplink,))
    return Topology(hosts, rails=rails, racks=racks)


@pytest.mark.parametrize("seed", range(40))
def test_input_takes_the_longest_of_its_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    topology = cluster(random)
    feeding = Feeding(
        worker_s=float(random.uniform(1e-4, 1e-2)),
        cpu_s=float(random.uniform(0, 1e-2)),
        workers=int(random.integers(1, 9)),
        cores=None if seed % 3 == 0 else float(random.uniform(1, 64)),
        compute_cores=float(random.uniform(0, 4)),
        batch_s=float(random.uniform(0, 0.2)),
        source_bytes_per_s=None if seed % 2 else float(random.uniform(1e8, 1e10)),
        sample_bytes=float(random.uniform(1e3, 1e6)),
    )
    samples, compute_s = 32, 0.1
    wanted = {"workers": samples * feeding.worker_s / feeding.workers, "loading thread": feeding.batch_s}
    sizes = [len(host) for host in topology.hosts]
    if feeding.cores is not None:
        busy_s = samples * feeding.cpu_s + compute_s * feeding.compute_cores + feeding.batch_s
        wanted["cores"] = max(sizes) * busy_s / feeding.cores
    if feeding.source_bytes_per_s is not None and feeding.sample_bytes is not None:
        held = samples * feeding.sample_bytes
        wanted["source"] = sum(sizes) * held / feeding.source_bytes_per_s
        wanted["host's network"] = max(sizes) * held / topology.rails[0].bandwidth_bytes_per_s
        for rack in topology.racks:
            for uplink in filter(None, rack.uplinks):
                need = sum(sizes[host] for host in rack.hosts) * held / uplink.bandwidth_bytes_per_s
                wanted["racks' uplinks"] = max(need, wanted.get("racks' uplinks", 0.0))
    found = input_time(feeding, samples, compute_s, topology)
    assert found.bound == max(wanted, key=lambda name: wanted[name])
    assert found.seconds == pytest.approx(wanted[found.bound])


def test_equal_hosts_read_as_data_plan_says() -> None:
    topology = preset("summit").topology
    by_rank, by_host = (site_of(topology, source=2.5e12, by_rank=each) for each in (True, False))
    held = 1e9
    ours, theirs = each_for_itself(by_rank, 0, held), each_for_itself(by_host, 0, 6 * held)
    assert ours.seconds == pytest.approx(theirs.seconds)
    assert ours.bound == theirs.bound


def test_a_step_takes_as_long_as_its_samples() -> None:
    """The step is the longer of the two: making the samples, and all the rest."""
    topology = preset("ddl").topology
    rest = step_of(step_profile_of([PROFILE], 8), part_of(topology, 8)).seconds.total - PROFILE.seconds.input
    for workers in (1, 2, 4, 8):
        feeding = FED.feeding(workers=workers)
        step = step_of(step_profile_of([PROFILE], 8, feeding=feeding), part_of(topology, 8))
        made_s = 32 * 0.004 / workers
        assert step.seconds.total == pytest.approx(max(rest, made_s))
        assert step.seconds.input == pytest.approx(max(0.0, made_s - rest))
        assert step.bound == ("input" if made_s > rest else "compute")
        assert step.input is not None
        assert step.input.seconds == pytest.approx(made_s)
        assert step.input.bound == "workers"
        changed = changes_of(
            lambda *_, fed=feeding: step_profile_of([PROFILE], 8, feeding=fed),
            32,
            PROFILE.exchange,
            part_of(topology, 8),
        )
        (more,) = (each for each in changed if each.what == f"{2 * workers} workers a rank")
        assert more.step.seconds.total == pytest.approx(max(rest, made_s / 2))


def test_ranks_that_share_cores_lose_efficiency() -> None:
    """A rank alone has all cores of its host; four ranks have a quarter each."""
    topology = part_of(preset("ddl").topology, 4)
    assert len(topology.hosts) == 1
    feeding = FED.feeding(workers=8, cores=2)
    alone, four = (
        step_of(step_profile_of([PROFILE], ranks, feeding=feeding), part_of(topology, ranks)) for ranks in (1, 4)
    )
    assert four.input is not None
    assert (four.input.bound, four.bound) == ("cores", "input")
    assert four.seconds.total == pytest.approx(4 * 32 * 0.003 / 2)
    assert alone.efficiency == 1
    assert four.efficiency == pytest.approx(alone.seconds.total / four.seconds.total)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_profiled_rank_gets_its_own_step_back(workers: int) -> None:
    """Its wait for input is explained by its workers, and what they do not explain stays."""
    for wait_s in (0.0, 0.002, 0.01, 0.05):
        rest_s = PROFILE.seconds.step - PROFILE.seconds.input
        made_s = 32 * FED.worker_s / workers
        seconds = replace(PROFILE.seconds, input=wait_s, step=rest_s + wait_s)
        profile = replace(PROFILE, seconds=seconds, feeding=replace(FED, workers=workers))
        assert profile.feeding is not None
        found = step_of(step_profile_of([profile], 1, feeding=profile.feeding.feeding()), Topology(((0,),)))
        assert found.seconds.total == pytest.approx(max(rest_s + wait_s, made_s))
        # Ten times as many workers: what was a wait for them is gone.
        fast = profile.feeding.feeding(workers=10 * workers)
        found = step_of(step_profile_of([profile], 1, feeding=fast), Topology(((0,),)))
        assert found.seconds.total == pytest.approx(rest_s + max(0.0, wait_s - max(0.0, made_s - rest_s)))
        # Half as many: the step is longer by what the workers take longer, if it waited for them before.
        if workers > 1:
            slow = profile.feeding.feeding(workers=workers // 2)
            found = step_of(step_profile_of([profile], 1, feeding=slow), Topology(((0,),)))
            assert found.seconds.total >= max(2 * made_s, rest_s + wait_s) - 1e-9


def test_files_give_their_values_back() -> None:
    assert measured_feeding_of(FED.as_text()) == FED
    fed = replace(PROFILE, feeding=replace(FED, compute_cores=1.5, sample_bytes=0.0))
    assert script_profile_of(fed.as_text()) == fed
    assert "feeding" not in PROFILE.as_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"worker_s": 0.004', '"worker_s": -0.004', "line 4, field worker_s: -0.004: want a number, 0 or more"),
        ('"worker_s": 0.004', '"worker_s": 0', "line 4, field worker_s: 0: want a number above 0"),
        ('"workers": 2', '"workers": 0', "line 3, field workers: 0: want a whole number, 1 or more"),
        ('"workers": 2', '"workers": 2.5', "line 3, field workers: 2.5: want a whole number, 1 or more"),
        ('"workers": 2', '"threads": 2', "line 3, field threads: unknown: want workers, worker_s, cpu_s"),
        ('"workers": 2,', "", "the file lacks workers"),
        ('"cpu_s": 0.003', '"cpu_s": NaN', "line 5: NaN: want a finite number"),
        ('"multiring_input": 1', '"multiring_input": 2', "line 2, field multiring_input: want 1: measure anew"),
        ('"multiring_input": 1', '"input": 1', 'no field "multiring_input"; want a file of `multiring data bench'),
        ("{", "", "want a file of `multiring data bench --save`"),
    ],
)
def test_wrong_files_are_refused_with_line_and_field(
    old: str, new: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = FED.as_text()
    assert old in text
    file = tmp_path / "input.json"
    file.write_text(text.replace(old, new, 1))
    assert main([*STEP, "8", "--input", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"--input {file}: " in said
    assert words in said
    if '"multiring_input"' not in old and old != "{":
        inside = replace(PROFILE, feeding=FED).as_text().replace(old, new, 1)
        with pytest.raises(ArgumentError, match="feeding" if "NaN" not in new else "want a finite number"):
            script_profile_of(inside)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--workers", "0"], "--workers 0: want a whole number, 1 to"),
        (["--cores-per-host", "-2"], "--cores-per-host -2: want a number above 0"),
        (["--source-rate", "nan"], "--source-rate nan: want a number above 0"),
        (["--source-rate", "inf"], "--source-rate inf: want a number above 0"),
        (["--sample-bytes", "9"], "--sample-bytes: want --source-rate, too"),
        (["--workers", "4"], "--workers: nothing says what a worker takes for a sample; want --input FILE"),
        (["--input", "nowhere.json"], "--input nowhere.json: [Errno 2] No such file or directory"),
    ],
)
def test_wrong_options_are_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "8", *words]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_tells_the_input_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input.json"
    file.write_text(FED.as_text())
    command = [*STEP, "4,8", "--rate", "1000", "--input", str(file), "--workers", "3"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for step in found["steps"]:
        assert step["input"]["samples_per_s_of_rank"] == pytest.approx(3 / 0.004)
        assert (step["input"]["bound"], step["input"]["workers"]) == ("workers", 3)
        parts = ("input_wait_s", "outside_s", "compute_s", "waiting_s", "exposed_s", "update_s")
        assert sum(step[name] for name in parts) == pytest.approx(step["step_s"])
        assert step["step_s"] >= 64 / 750
    assert main([*command, "--source-rate", "1e8"]) == 0
    said = capsys.readouterr().out
    assert "input/s a rank" in said
    assert "Input: 3 workers a rank, each on a core, a source of 1e+08 bytes/s; a worker takes 4 ms" in said
    assert " 250" in said  # 1e8 bytes/s for 4 ranks with samples of 1e5 bytes
    page = tmp_path / "page.html"
    assert main([*command, "--html", str(page)]) == 0
    assert "bounded by workers" in page.read_text()
    # A step that waits for input has no interval, because the recorded runs had fast input.
    assert main([*STEP, "1", "--rate", "1000", "--input", str(file), "--json"]) == 0
    said = capsys.readouterr().out
    (step,) = json.loads(said[said.index("{") :])["steps"]
    assert (step["bound"], step["step_90_s"]) == ("input", None)


def test_a_file_of_workers_leaves_the_profile_its_computing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks of a host compute on its cores, too, whoever has measured the workers."""
    file = tmp_path / "input.json"
    file.write_text(FED.as_text())
    command = ["simulate", "--topology", "ddl", "--ranks", "4", "--input", str(file), "--cores-per-host", "2"]
    assert len(part_of(preset("ddl").topology, 4).hosts) == 1
    computes_s = PROFILE.seconds.forward + PROFILE.seconds.backward
    for cores_used, told in ((1.5, ""), (None, ", of which the rest of a rank is taken to need none")):
        own = None if cores_used is None else MeasuredFeeding(workers=8, worker_s=9.0, cpu_s=9.0, compute_cores=1.5)
        seconds = replace(PROFILE.seconds, input=0.0, step=PROFILE.seconds.step - PROFILE.seconds.input)
        profile = tmp_path / "profile.json"
        profile.write_text(replace(PROFILE, feeding=own, seconds=seconds).as_text())
        assert main([*command, "--profile", str(profile), "--json"]) == 0
        (step,) = json.loads(capsys.readouterr().out)["steps"]
        busy_s = 32 * FED.cpu_s + (cores_used or 0.0) * computes_s
        assert step["input"]["bound"] == "cores"
        assert step["input"]["seconds"] == pytest.approx(4 * busy_s / 2)
        assert step["step_s"] == pytest.approx(4 * busy_s / 2)
        assert main([*command, "--profile", str(profile)]) == 0
        assert f"Input: 2 workers a rank, 2 cores a host{told}; a worker takes 4 ms" in capsys.readouterr().out


def test_workers_are_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input.json"
    file.write_text(FED.as_text())
    command = [*STEP, "8", "--rate", "1000", "--sweep", "lag=0,1"]
    assert main([*command, "--sweep", "workers=1,64", "--input", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["workers"] for each in found["points"]] == [1, 64, 1, 64]
    for slow, fast in (found["points"][:2], found["points"][2:]):
        assert slow["step_s"] == pytest.approx(64 * 0.004)
        assert (slow["bound"], fast["bound"], fast["input_wait_s"]) == ("input", "communication", 0)
    assert main([*command, "--sweep", "workers=1,64"]) == 2
    assert "--sweep workers=1,64: nothing says what a worker takes for a sample" in capsys.readouterr().err
    assert main([*command, "--sweep", "workers=0", "--input", str(file)]) == 2
    assert "--sweep workers=0: '0': want a whole number, 1 or more" in capsys.readouterr().err


def test_without_a_measurement_input_is_not_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "8"]) == 0
    said = capsys.readouterr().out
    assert "Input is not priced: nothing says what a worker takes for a sample." in said
    assert "input/s" not in said
    file = tmp_path / "profile.json"
    file.write_text(PROFILE.as_text())
    assert main(["simulate", "--topology", "ddl", "--profile", str(file), "--ranks", "4", "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["input"] is None
    assert step["outside_s"] == pytest.approx(PROFILE.seconds.input + PROFILE.seconds.other)


def test_workers_work_at_least_as_long_as_they_are_on_a_core() -> None:
    """On a busy machine, the waits for a core that are counted can be longer than the measurement."""
    assert working_s({"disk": 1.0, "decode": 2.0, "copy": 0.5, "queued": 0.7, "cpu": 2.5}) == pytest.approx(2.8)
    assert working_s({"decode": 2.0, "queued": 2.5, "cpu": 0.4, "disk alone": 9.0}) == 0.4
    assert working_s({}) == 0
