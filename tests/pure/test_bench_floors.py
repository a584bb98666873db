"""benchmarks/promises/floors.py: the records it accepts, and its verdicts on two commands' figures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.promises import floors


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the benches that run; each one prints a numbered record of commit "now"."""
    started: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(words)
        return subprocess.CompletedProcess(words, 0, stdout=json.dumps({"commit": "now", "at": len(started)}) + "\n")

    monkeypatch.setattr(floors, "KEPT", tmp_path)
    monkeypatch.setattr(floors, "commit", lambda: "now")
    monkeypatch.setattr("subprocess.run", run)
    return started


LINE = floors.Line("line", ("barrier", "barrier --ranks 2"), lambda _: ())
NOW = [{"commit": "now", "at": 1}, {"commit": "now", "at": 2}]


def keep(*commits: str | None) -> list[dict[str, Any]]:
    records = [{"not_offered": "never"} if commit is None else {"commit": commit} for commit in commits]
    (floors.KEPT / "line.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def test_a_line_is_measured_once(runs: list[list[str]]) -> None:
    assert floors.measured(LINE, again=False, keep=False) == NOW
    assert floors.measured(LINE, again=False, keep=False) == NOW
    start = [sys.executable, "-m", "multiring", "bench", "barrier"]
    assert runs == [[*start, "--json"], [*start, "--ranks", "2", "--json"]]


@pytest.mark.parametrize("commits", [("then",), ("now", "then"), ("now", None, "now-dirty"), (None,), ()])
def test_records_of_another_commit_are_measured_again(runs: list[list[str]], commits: tuple[str | None, ...]) -> None:
    keep(*commits)
    assert floors.measured(LINE, again=False, keep=False) == NOW
    assert len(runs) == 2


def test_records_of_this_commit_stay_and_those_of_others_on_demand(runs: list[list[str]]) -> None:
    kept = keep("now", None)
    assert floors.measured(LINE, again=False, keep=False) == kept
    kept = keep("then")
    assert floors.measured(LINE, again=False, keep=True) == kept
    assert runs == []
    assert floors.measured(LINE, again=True, keep=False) == NOW


def test_bfloat16_is_the_median_of_all_alternations_of_commands_in_turn() -> None:
    (line,) = [line for line in floors.LINES if line.name == "bfloat16"]
    assert ["bfloat16" in command for command in line.commands] == [False, True, False, True]

    def record(dtype: str, *seconds: float) -> dict[str, Any]:
        size = floors.MIB * (64 if dtype == "float32" else 32)
        middle = sorted(seconds)[1]
        return {"library": "multiring", "size_bytes": size, "dtype": dtype, "seconds": seconds, "median_s": middle}

    records = [
        record("float32", 4.0, 5.0, 6.0),
        record("bfloat16", 1.0, 2.0, 2.0),
        record("float32", 8.0, 9.0, 9.0),
        record("bfloat16", 2.0, 3.0, 9.0),
    ]
    (verdict,) = line.judge(records)
    assert verdict.figure == "3.50 x float32"  # 7 / 2
    assert verdict.holds


def test_horovod_is_measured_where_the_docstring_says() -> None:
    lines = [line.name for line in floors.LINES if any("horovod" in command for command in line.commands)]
    assert lines == ["arena", "four-ranks"]
    assert all(f"`{name}`" in (floors.__doc__ or "") for name in lines)
