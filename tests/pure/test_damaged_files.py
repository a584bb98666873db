"""Readers of profiles, timelines, runs, topologies, presets and published runs refuse damaged files in words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.pure.test_script_profile import PROFILE
from tests.pure.test_step_grades import timeline
from tests.support.damage import Reader, as_toml, complaint, damaged
from tests.support.timelines import timeline_text

from multiring._cli import main
from multiring._cli.drawings import timeline as drawn_timeline
from multiring._diagnosis.recorded_steps import read_steps
from multiring._diagnosis.run_record import METRICS, RESULT, record_findings
from multiring._diagnosis.slow_run import read_timeline, run_findings
from multiring._simulator.measured_feeding import MeasuredFeeding, measured_feeding_of
from multiring._simulator.presets import preset_of
from multiring._simulator.published import rows_of
from multiring._simulator.script_profile import script_profile_of, step_profile_of
from multiring._simulator.step import step_of
from multiring._strict_json import line_of, strict_json
from multiring._topology import Topology, topology_of
from multiring.errors import ArgumentError

FED = MeasuredFeeding(workers=2, worker_s=0.004, cpu_s=0.003, compute_cores=1.5, sample_bytes=1e5)
SOURCED = {
    "about": {"title": "A cluster", "accelerator": "X", "usd_per_host_hour": 3.5, "priced": "2026-01-01"},
    "shm": {"bandwidth_mbit_per_s": 80000, "latency_us": 1.5, "overhead_us": 1},
    "rails": [{"interface": "rail0", "bandwidth_mbit_per_s": 25000, "latency_us": 0, "overhead_us": 2.7}],
    "hosts": [{"name": "host[1-4]", "slots": 4}],
    "sources": {
        name: f"a paper about {name}"
        for name in (
            "about.usd_per_host_hour",
            "shm.bandwidth_mbit_per_s",
            "shm.latency_us",
            "shm.overhead_us",
            "rails.bandwidth_mbit_per_s",
            "rails.latency_us",
            "rails.overhead_us",
            "hosts.name",
            "hosts.slots",
        )
    },
}
TOPOLOGY = {
    "takes_turns": False,
    "shm": SOURCED["shm"],
    "devices": {"copy_latency_us": 20, "to_host_mbit_per_s": 80000.0, "nccl_latency_us": 1.5},
    "rails": [
        {"interface": "rail0", "bandwidth_mbit_per_s": 25000, "latency_us": 5, "overhead_us": 2.7},
        {"interface": "rail1", "bandwidth_mbit_per_s": 25000.5, "reduce_mbit_per_s": 90000},
    ],
    "racks": [{"name": "r0", "uplinks": {"rail0": {"bandwidth_mbit_per_s": 9000}}}, {"name": "r1"}],
    "hosts": [
        {"name": "a[1-4]", "slots": 2, "rack": "r0", "rails": {"rail1": {"latency_us": 7}}},
        {
            "name": "b",
            "slots": 4,
            "rack": "r1",
            "devices": {
                "kind": "X",
                "count": 4,
                "nvlinks": 6,
                "link": "pcie",
                "islands": [{"devices": [0, 1], "link": "nvlink"}],
            },
        },
    ],
}
PUBLISHED = {
    "sources": {"paper": "Some, table 3", "page": "example.org"},
    "rates": {
        "one": {
            "accelerator": "X",
            "model": "resnet50",
            "precision": "fp32",
            "batch": 64,
            "samples_per_s": 219.5,
            "source": "page",
        }
    },
    "clusters": {"mine": SOURCED},
    "models": {
        "small": {"layers": [[9408, 118013952], [2048000, 2048000]], "source": "paper"},
        "equal": {"parameters": 25557032, "source": "paper"},
    },
    "rows": [
        {
            "name": "four",
            "cluster": "mine",
            "model": "small",
            "precision": "fp32",
            "batch_per_rank": 64,
            "ranks": 4,
            "efficiency": [0.8, 0.9],
            "source": "paper",
            "rate": "one",
            "gradient_bytes": 2,
            "gradient_source": "paper",
        },
        {
            "name": "eight",
            "cluster": "mine",
            "model": "equal",
            "precision": "fp32",
            "batch_per_rank": 32,
            "ranks": 8,
            "relative_to": 2,
            "samples_per_s": 1500,
            "samples_per_s_before": 420.5,
            "source": "paper",
            "rate": "one",
        },
    ],
}
RECORDS = [
    {"kind": "step", "step": 10 * at, "wall_s": 5.5 * at, "loss": 1.5, "waited": 0.1, "rate": 0.1}
    for at in range(1, 31)
]
RUN_RESULT = {"step": {"exposed communication, ms a step": 4.5, "seconds of training": 20.0, "steps": 300}, "best": 0.9}


def read_profile(text: str) -> None:
    """Read a profile and predict with it."""
    profile = script_profile_of(text)
    feeding = None if profile.feeding is None else profile.feeding.feeding(cores=4)
    step_of(step_profile_of([profile], 2, feeding=feeding), Topology(((0, 1),)))


def read_feeding(text: str) -> None:
    """Read a file of what workers take, and predict with it."""
    feeding = measured_feeding_of(text).feeding(cores=4, source_bytes_per_s=1e9, sample_bytes=1e5)
    step_of(step_profile_of([PROFILE], 2, feeding=feeding), Topology(((0, 1),)))


def read_run(folder: Path, lines: str, result: str) -> None:
    """Look at a run with this record."""
    (folder / METRICS).write_text(lines)
    (folder / RESULT).write_text(result)
    record_findings(folder)


def read_whole_timeline(folder: Path, text: str) -> None:
    """Let all three readers of timelines read one."""
    path = folder / "run.json"
    path.write_text(text)
    run_findings(read_timeline(path))
    drawn_timeline(path, 2)
    read_steps(path)


def readers(folder: Path) -> dict[str, Reader]:
    """Return all readers with an intact file for each."""
    events = json.loads(timeline_text(timeline(6), hosts=["a", "b"]))
    return {
        "profile": Reader(
            read=read_profile, whole=json.loads(replace(PROFILE, feeding=FED).as_text()), write=json.dumps
        ),
        "input": Reader(read=read_feeding, whole=json.loads(FED.as_text()), write=json.dumps),
        "timeline": Reader(
            read=lambda text: read_whole_timeline(folder, text),
            whole=events,
            write=json.dumps,
            free=("offset_us", "size"),
        ),
        "record": Reader(
            read=lambda text: read_run(folder, text, json.dumps(RUN_RESULT)),
            whole=RECORDS,
            # The last line may be damaged: the run writes it now.
            write=lambda found: "\n".join(map(json.dumps, [*found, RECORDS[-1]])),
            free=("loss", "rate"),
        ),
        "result": Reader(
            read=lambda text: read_run(folder, "\n".join(map(json.dumps, RECORDS)), text),
            whole=RUN_RESULT,
            write=json.dumps,
            free=("best",),
        ),
        "topology": Reader(read=topology_of, whole=TOPOLOGY, write=as_toml),
        "preset": Reader(read=lambda text: preset_of(text, "mine"), whole=SOURCED, write=as_toml),
        "published": Reader(read=lambda text: rows_of(text, "rows.toml"), whole=PUBLISHED, write=as_toml),
    }


@pytest.mark.parametrize(
    "name", ["profile", "input", "timeline", "record", "result", "topology", "preset", "published"]
)
def test_damaged_files_are_refused_in_words(name: str, tmp_path: Path) -> None:
    """benchmarks/evidence/foresight/damage.py runs many more."""
    reader = readers(tmp_path)[name]
    reader.read(reader.write(reader.whole))
    complaints = {complaint(reader, each) for each in damaged(reader, 400, seed=7)}
    assert complaints <= {""}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "latency_us = 5",
            "latency_ms = 5",
            "line 6: rail 'rail0': unknown key 'latency_ms'; known are ",
        ),
        ("25000\n", "-25000\n", "line 5: rail 'rail0': bandwidth_mbit_per_s = -25000: want a number > 0"),
        ("25000\n", "nan\n", "line 5: rail 'rail0': bandwidth_mbit_per_s = nan: want a number > 0"),
        ("9000", "true", "line 12: uplinks of rack 'r0': rail0: bandwidth_mbit_per_s = True: want a number > 0"),
        (
            "uplinks.rail0",
            "uplinks.rail7",
            "line 12: uplinks of rack 'r0': unknown link 'rail7'",
        ),
        (
            'rack = "r1"',
            'rack = "r9"',
            "line 20: host 'b' is in rack 'r9', which is not defined: want the rack of every",
        ),
        ('rack = "r1"\n', "", "line 19: host 'b' is in no rack: want the rack of every host, or of none"),
        (
            "slots = 4",
            "slots = 99999999",
            "line 21: host 'b': slots = 99999999: want at most 1048576 ranks",
        ),
    ],
)
def test_a_wrong_topology_is_refused_with_its_line(old: str, new: str, reason: str) -> None:
    text = (
        'shm.latency_us = 2\n\n[[rails]]\ninterface = "rail0"\nbandwidth_mbit_per_s = 25000\nlatency_us = 5\n\n'
        '[[racks]]\nname = "r1"\n[[racks]]\nname = "r0"\nuplinks.rail0 = { bandwidth_mbit_per_s = 9000 }\n\n'
        '[[hosts]]\nname = "a[1-2]"\nrack = "r0"\n\n[[hosts]]\nname = "b"\nrack = "r1"\nslots = 4\n'
    )
    assert topology_of(text).ranks == 6
    assert text.count(old) == 1
    with pytest.raises(ArgumentError) as found:
        topology_of(text.replace(old, new))
    assert str(found.value).startswith(reason)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"dur": 10000', '"lasts": 10000', "event 8 (line 10): no field 'dur'"),
        ('"ts": 30000', '"ts": -1', "event 8 (line 10), field ts: -1: want a number, 0 or more"),
        ('"bytes": 3145728', '"bytes": "3 MiB"', 'event 10 (line 12), field args.bytes: "3 MiB": want a whole number'),
        ('"tid": 1, "ts"', '"tid": 9, "ts"', "event 8 (line 10), field tid: row 9 of rank 0 has no event thread_name"),
        ('"pid": 0, "tid": 1, "ts"', '"pid": 7, "tid": 1, "ts"', "rank 7 has events, but metadata.ranks lacks it"),
        ('"operation": 0', '"operation": 0, "operation": 1', "line 12: the field 'operation' is there twice"),
        ('"host": "b"', '"host": 5', "field metadata.ranks.1.host: 5: want text"),
    ],
)
def test_a_damaged_timeline_is_refused_with_its_event(
    old: str, new: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, profile = tmp_path / "run.json", tmp_path / "profile.json"
    text = timeline_text(timeline(6), hosts=["a", "b"])
    assert old in text
    path.write_text(text.replace(old, new, 1))
    profile.write_text(PROFILE.as_text())
    for command in (
        ["doctor", "--timeline", str(path)],
        ["simulate", "--profile", str(profile), "--against", str(path)],
        ["trace", "draw", str(path), str(tmp_path / "run.svg")],
    ):
        assert main(command) == 2
        assert reason in capsys.readouterr().err


def test_lines_of_values_and_of_what_is_refused() -> None:
    text = '{\n "a": {"b": [1,\n  {"c": "}]"},\n {"c": 5}]},\n "d": 1}\n'
    assert [line_of(text, path) for path in (("a", "b", 1, "c"), ("a", "b", 2, "c"), ("d",), ("a", "x"))] == [
        3,
        4,
        5,
        2,
    ]
    for wrong, reason in (
        (text.replace("5", "NaN"), "line 4: NaN: want a finite number"),
        (text.replace("5", "1e999"), "line 4: 1e999: want a number that 64 bits can hold"),
        (text.replace(": 1}", ": 9" + 30 * "9" + "}"), "line 5: 9999999999999999999...: want a number that 64 bits"),
        (text.replace(' "d": 1', ' "a": 1'), "line 5: the field 'a' is there twice"),
        (text[:-3], "line 5: "),
        (100_000 * "[", "not JSON: "),
    ):
        with pytest.raises(ArgumentError) as found:
            strict_json(wrong)
        assert str(found.value).startswith(reason), wrong[:80]
