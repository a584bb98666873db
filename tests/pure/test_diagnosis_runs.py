"""The doctor names the straggler and the phase from a timeline, and faults from a run's folder."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.timelines import timeline_text

from multiring._cli import main
from multiring._diagnosis.findings import FindingKind
from multiring._diagnosis.run_record import METRICS, RESULT, findings_of_records, record_findings
from multiring._diagnosis.slow_run import read_timeline, run_findings, times_of
from multiring.errors import ArgumentError

PHASES = ("forward", "backward", "optimizer", "augment")
MS = 1000.0


def timeline(
    ranks: int, slow: int, phase: str, extra_ms: float, *, wire_ms: float = 1.0, part: int = 1
) -> list[dict[str, Any]]:
    """Return the events of six steps in which one rank spends more time in a phase, every `part`-th step."""
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        for row, name in ((1, "program"), (2, f"ranks 0-{ranks - 1}")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})

    def add(rank: int, row: int, name: str, kind: str, start: float, end: float, **arguments: Any) -> None:
        place = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": row, "ts": start, "dur": end - start}
        events.append({**place, "args": arguments})

    now = 0.0
    for step in range(6):
        at = dict.fromkeys(range(ranks), now)
        for rank in range(ranks):
            for each in PHASES:
                took = 10 * MS + (extra_ms * MS if (rank, each) == (slow, phase) and step % part == 0 else 0.0)
                kind = each if each in ("forward", "backward", "optimizer") else "span"
                add(rank, 1, f"{each} Net" if kind != "span" else each, kind, at[rank], at[rank] + took)
                if each == "forward":  # a module's own span, within it
                    add(rank, 1, "attention", "span", at[rank] + MS, at[rank] + 2 * MS)
                at[rank] += took
        now = max(at.values()) + wire_ms * MS
        for rank in range(ranks):
            add(rank, 2, "all_reduce", "operation", at[rank], now, operation=step, bytes=1 << 20)
            add(rank, 2, "agree", "agree", at[rank], max(at.values()))
            add(rank, 2, "wire", "wire", max(at.values()), now)
            add(rank, 1, "wait", "wait", at[rank], now)
    return events


@given(st.integers(2, 6), st.integers(0, 5), st.sampled_from(PHASES), st.floats(5.0, 100.0), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_straggler_and_its_phase_are_named(ranks: int, slow: int, phase: str, extra_ms: float, part: int) -> None:
    extra_ms = extra_ms * part
    (found,) = run_findings(times_of(timeline(ranks, slow % ranks, phase, extra_ms, part=part)))
    assert (found.kind, found.where) == (FindingKind.STRAGGLER, f"rank {slow % ranks}")
    assert found.found.endswith(f"in: {phase}")


@given(st.integers(2, 6), st.integers(0, 5), st.sampled_from(PHASES), st.floats(0.0, 1.5))
@settings(max_examples=40, deadline=None)
def test_a_run_without_a_straggler_has_no_finding(ranks: int, slow: int, phase: str, extra_ms: float) -> None:
    assert run_findings(times_of(timeline(ranks, slow % ranks, phase, extra_ms))) == []


def test_waiting_for_bytes_is_named() -> None:
    (found,) = run_findings(times_of(timeline(3, 0, "forward", 0.0, wire_ms=30.0)))
    assert found.kind is FindingKind.COMMUNICATION
    assert "43% of the run" in found.found


def test_lost_rails_and_missing_ranks_are_named() -> None:
    events = timeline(3, 0, "forward", 0.0)
    events.append({"ph": "i", "name": "rail 1 to rank 2 is given up", "pid": 0, "tid": 1, "ts": 5.0})
    found = run_findings(times_of(events, missing=[3]))
    assert [(each.kind, each.where) for each in found] == [
        (FindingKind.SILENT, "rank 3"),
        (FindingKind.RAIL_LOST, "rank 0"),
    ]


def write(path: Path, events: list[dict[str, Any]], writer: str = "multiring 1.0") -> Path:
    text = timeline_text(events, hosts=["a", "a", "b"], writer=writer).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_reads_a_timeline(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / name, timeline(3, 1, "augment", 40.0))
    assert main(["doctor", "--timeline", str(path)]) == 1
    assert "straggler (certain): rank 1: " in capsys.readouterr().out
    assert main(["doctor", "--timeline", str(path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["kind"] == "straggler"
    healthy = write(tmp_path / f"healthy-{name}", timeline(3, 1, "augment", 0.0))
    assert main(["doctor", "--timeline", str(healthy)]) == 0
    assert capsys.readouterr().out == "nothing is wrong\n"


def test_other_timelines_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other.json", timeline(2, 0, "forward", 0.0), writer="torch.profiler")
    with pytest.raises(ArgumentError, match=r"field metadata.written_by: 'torch\.profiler' wrote it"):
        read_timeline(other)
    lone = write(tmp_path / "lone.json", timeline(1, 0, "forward", 0.0))
    with pytest.raises(ArgumentError, match="no collective of several ranks"):
        read_timeline(lone)
    for text in ("", "[]", '{"traceEvents": []}', "not json", "\x1f\x8b"):
        (tmp_path / "bad.json").write_text(text, encoding="latin-1")
        with pytest.raises(ArgumentError, match="want a file of `multiring run --timeline`"):
            read_timeline(tmp_path / "bad.json")
    assert main(["doctor", "--timeline", str(tmp_path / "absent")]) == 2
    assert "could not look: " in capsys.readouterr().err
    for words in (["--hosts", "a:2"], ["-n", "2"]):
        assert main(["doctor", "--run", str(tmp_path), *words]) == 2
        assert f"{' '.join(words)} with --timeline or --run: what a run has left" in capsys.readouterr().err


# ---- runs ----


def records(count: int = 30, **values: float) -> list[dict[str, float]]:
    return [{"step": 10.0 * at, "wall_s": 5.0 * at, "loss": 1.0, "waited": 0.1, **values} for at in range(1, count + 1)]


def test_a_healthy_run_has_no_finding() -> None:
    paused = records()
    for each in paused[10:]:
        each["wall_s"] += 100.0  # an evaluation, or a process that was started again
    result = {"step": {"steps": 300, "seconds of training": 150.0, "exposed communication, ms a step": 100.0}}
    assert findings_of_records(records(), {}) == []
    assert findings_of_records(paused, result) == []


def test_faults_of_a_run_are_named() -> None:
    broken = records()
    broken[4]["loss"] = float("nan")
    assert [(each.kind, each.where) for each in findings_of_records(broken, {})] == [(FindingKind.LOSS, "step 50")]
    (waiting,) = findings_of_records(records(waited=0.4), {})
    assert waiting.kind is FindingKind.INPUT
    slowed = records()
    for at, each in enumerate(slowed[15:]):
        each["wall_s"] += 5.0 * (at + 1)
    (found,) = findings_of_records(slowed, {})
    assert found.kind is FindingKind.SLOWED
    assert found.where.startswith("from step 1")
    result = {"step": {"steps": 300, "seconds of training": 150.0, "exposed communication, ms a step": 200.0}}
    (exposed,) = findings_of_records(records(), result)
    assert exposed.kind is FindingKind.COMMUNICATION


def test_a_folder_is_read_and_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="want the folder of a run"):
        record_findings(tmp_path)
    lines = [json.dumps({"kind": "step", **each}) for each in records(waited=0.3)]
    lines.insert(3, json.dumps({"kind": "evaluation", "step": 30}))
    (tmp_path / METRICS).write_text("\n".join([*lines, '{"kind": "st']), encoding="utf-8")
    assert [each.kind for each in record_findings(tmp_path)] == [FindingKind.INPUT]
    assert main(["doctor", "--run", str(tmp_path)]) == 1
    (tmp_path / METRICS).write_text("\n".join([lines[0], "{", *lines[1:]]), encoding="utf-8")
    with pytest.raises(ArgumentError, match="line 2"):
        record_findings(tmp_path)
    (tmp_path / METRICS).write_text(lines[3] + "\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="no record of a step"):
        record_findings(tmp_path)


def test_the_names_are_those_that_training_writes() -> None:
    package = importlib.util.find_spec("multiring")
    assert package is not None
    assert package.origin is not None
    text = (Path(package.origin).parent / "training" / "run_folder.py").read_text(encoding="utf-8")
    names = next(line for line in text.splitlines() if line.startswith("OPTIONS, METRICS"))
    assert f'"{METRICS}"' in names
    assert f'"{RESULT}"' in names
    training = Path(package.origin).parent / "training"
    writing = "".join((training / name).read_text(encoding="utf-8") for name in ("loop.py", "speed_figures.py"))
    for name in (
        "waited=",
        "wall_s=",
        "loss=",
        '"exposed communication, ms a step"',
        '"seconds of training"',
        '"steps"',
    ):
        assert name in writing
