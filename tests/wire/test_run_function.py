"""`multiring.run`: run a function on ranks of this machine, from a script or a notebook."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import multiring
from multiring.errors import ArgumentError, LaunchError


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit ranks to one computing thread, because other tests use the cores too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def total(base: float, *, factor: float = 1.0) -> tuple[int, float]:
    group = multiring.init()
    summed = np.array([base * factor + group.rank])
    group.all_reduce(summed)
    return group.rank, float(summed[0])


def test_results_come_by_rank() -> None:
    assert multiring.run(total, 3, (1.0,), {"factor": 2.0}) == [(0, 9.0), (1, 9.0), (2, 9.0)]


def test_output_goes_to_the_programs_own_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # In a notebook, the streams are no files, and text written to the descriptors is not shown.
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)

    def speak() -> None:
        multiring.init()
        sys.stdout.write(f"{os.environ['GIVEN']} \N{GREEK SMALL LETTER ALPHA}\n")
        sys.stderr.write("aside\n")

    assert multiring.run(speak, ranks=2, env={"GIVEN": "word"}, log_dir=tmp_path) == [None, None]
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}] word \N{GREEK SMALL LETTER ALPHA}" for rank in (0, 1)]
    assert sorted(err.getvalue().splitlines()) == ["[0] aside", "[1] aside"]
    assert (tmp_path / "rank-1.err").read_text(encoding="utf-8") == "aside\n"


def test_a_ranks_error_is_the_cause() -> None:
    def fail() -> None:
        if multiring.init().rank == 1:
            raise ZeroDivisionError("rank one is unhappy")
        time.sleep(1000)

    with pytest.raises(LaunchError, match=r"did not return on every rank: rank 1 raised\nTraceback") as raised:
        multiring.run(fail, ranks=2)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2"])
def test_a_number_of_ranks_that_makes_no_job(ranks: object) -> None:
    with pytest.raises(ArgumentError, match=r"ranks=.*: want an integer, at least 1"):
        multiring.run(total, ranks)  # type: ignore[arg-type] # as a user may


def test_interrupting_once_lets_ranks_save_and_twice_kills(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "import multiring\n"
        "def wait(folder, is_deaf):\n"
        "    here = pathlib.Path(folder) / os.environ['MULTIRING_RANK']\n"
        "    here.write_text('up')\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(1000)\n"
        "        except KeyboardInterrupt:\n"
        "            here.write_text('saved')\n"
        "            if not is_deaf:\n"
        "                raise\n"
        "if __name__ == '__main__':\n"
        "    multiring.run(wait, 2, (sys.argv[1], sys.argv[2] == 'deaf'))\n"
    )
    for kind in ("once", "deaf"):
        folder = tmp_path / kind
        folder.mkdir()
        asking = subprocess.Popen([sys.executable, str(script), str(folder), kind], stderr=subprocess.PIPE, text=True)
        wait_for(folder, "up")
        asking.send_signal(signal.SIGINT)
        wait_for(folder, "saved")
        if kind == "deaf":
            asking.send_signal(signal.SIGINT)
        _, told = asking.communicate(timeout=30)
        assert asking.returncode == -signal.SIGINT, told
        assert ("killing ranks 0, 1" in told) == (kind == "deaf")


def wait_for(folder: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while [file.read_text() for file in folder.iterdir()] != [text] * 2:
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
