"""Copies of a profiled script: who waits for whom, and which of them still run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from multiring._launch.script_copies import READY, ScriptCopies

COPY = """
import sys
from pathlib import Path
from multiring._launch.script_copies import ScriptCopies
copies = ScriptCopies(Path(sys.argv[1]), [])
print("alive", flush=True)
sys.stdin.readline()
copies.meet()
print("met", flush=True)
sys.stdin.readline()
"""


def started(folder: Path) -> "subprocess.Popen[str]":
    folder.mkdir()
    copy = subprocess.Popen(
        [sys.executable, "-c", COPY, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert copy.stdout is not None
    assert copy.stdout.readline() == "alive\n"
    return copy


def go_on(copy: "subprocess.Popen[str]") -> None:
    assert copy.stdin is not None
    copy.stdin.write("\n")
    copy.stdin.flush()


def ended(copy: "subprocess.Popen[str]") -> None:
    copy.kill()
    copy.communicate(timeout=240)


def test_a_copy_runs_from_its_warm_up_to_its_end(tmp_path: Path) -> None:
    own, beside = tmp_path / "own", tmp_path / "beside"
    own.mkdir()
    copies = ScriptCopies(own, [beside])
    assert copies.running() == 0  # it has not even started
    copy = started(beside)
    try:
        assert copies.running() == 0
        go_on(copy)
        copies.meet()  # waits for it
        assert (own / READY).exists()
        assert copies.running() == 1
    finally:
        ended(copy)
    assert copies.running() == 0


def test_a_copy_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    own, beside = tmp_path / "own", tmp_path / "beside"
    own.mkdir()
    copies = ScriptCopies(own, [beside])
    ended(started(beside))
    began = time.monotonic()
    copies.meet()
    assert time.monotonic() - began < 60
    assert copies.running() == 0


def test_a_copy_that_never_comes_is_waited_for_no_longer_than_it_should_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr("multiring._launch.script_copies._LEAST_WAIT_S", 0.05)
    copies = ScriptCopies(own, [tmp_path / "never"])
    copies.meet()
    assert copies.running() == 0
