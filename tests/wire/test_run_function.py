"""`multiring.run`: run a function on ranks of this machine, from a script or a notebook."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring._launch import function_launcher
from multiring._launch.function import call_folder
from multiring._launch.pickled_call import CallFolder
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


@pytest.mark.parametrize("end", ["raises", "is killed", "returns"])
def test_a_large_result_is_whole_or_an_error_ends_the_call(end: str) -> None:
    def answer() -> Any:
        if multiring.init().rank == 1:
            if end == "raises":
                raise ZeroDivisionError("rank one is unhappy")
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return np.arange(30_000_000) + multiring.rank()  # 240 MB

    if end != "returns":
        with pytest.raises(LaunchError, match="rank 1 raised" if end == "raises" else "exit code 137"):
            multiring.run(answer, ranks=2)
        return
    for rank, each in enumerate(multiring.run(answer, ranks=2)):
        assert each.shape == (30_000_000,)
        assert (each[0], each[-1]) == (rank, 29_999_999 + rank)


def test_folders_of_killed_callers_are_removed_and_those_of_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "import tempfile, time\nfrom multiring._launch.function import call_folder\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "with call_folder() as folder:\n    print(folder, flush=True)\n    time.sleep(1000)\n"
    )
    with call_folder() as kept:
        caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert caller.stdout is not None
        left = Path(caller.stdout.readline().strip())
        assert {kept, left} == set(tmp_path.iterdir())
        assert multiring.run(os.getpid, 1)
        assert {kept, left} == set(tmp_path.iterdir())
        caller.kill()
        caller.communicate()
        assert multiring.run(os.getpid, 1)
        assert {kept} == set(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


class OnlyThereError(ArithmeticError):
    """Can be unpickled in the process that made it, and in no other."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return made_there, (os.getpid(),)


def made_there(process: int) -> OnlyThereError:
    if os.getpid() != process:
        raise OSError("this is another process")
    return OnlyThereError()


def test_an_error_that_cannot_be_unpickled_hides_neither_its_rank_nor_its_traceback() -> None:
    def fail() -> None:
        if multiring.init().rank == 1:
            raise OnlyThereError("rank one is unhappy")
        time.sleep(1000)

    with pytest.raises(LaunchError, match=r"rank 1 raised\nTraceback(?s:.*)rank one is unhappy") as raised:
        multiring.run(fail, ranks=2)
    assert "cannot be unpickled in the calling process: OSError: this is another process" in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_result_that_cannot_be_unpickled_names_its_rank() -> None:
    def answer() -> object:
        return OnlyThereError() if multiring.init().rank == 1 else 0

    with pytest.raises(LaunchError, match=r"rank 1 has ended, but its result .*: OSError: this is another process"):
        multiring.run(answer, ranks=2)


def test_an_internal_error_of_the_launcher_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"ranks": 1, "python": sys.executable, "hosts": None, "ssh_words": [], "variables": [], "log_dir": ""}
    (tmp_path / "job.json").write_text(json.dumps({**told, "horovod": False, "grace_s": 5.0}))

    def broken(*_: object) -> int:
        raise IndexError("list index out of range")

    monkeypatch.setattr(function_launcher, "die_with", lambda _: None)
    monkeypatch.setattr(function_launcher, "run_local", broken)
    with pytest.raises(IndexError):
        function_launcher.main([str(os.getpid()), str(tmp_path / "job.json")])
    assert "the launcher has failed: IndexError: list index out of range" in str(CallFolder(tmp_path).refusal)


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
        "    while True:\n"
        "        try:\n"
        "            if not here.exists():\n"
        "                here.write_text('up')\n"
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
        _, told = asking.communicate(timeout=240)
        assert asking.returncode == -signal.SIGINT, told
        assert ("killing ranks 0, 1" in told) == (kind == "deaf")


def test_an_interrupt_within_the_start_of_the_launcher_leaves_no_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # a handler that raises does so here

    monkeypatch.setattr("multiring._launch.function.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        multiring.run(time.sleep, 2, (1000.0,))
    assert len(begun) == 1
    assert begun[0].poll() is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_that_raises_ends_silent_ranks(tmp_path: Path) -> None:
    program = (
        "import multiring, os, pathlib, signal, sys, time\n"
        "def silent(folder):\n"
        "    group = multiring.init()\n"
        "    pathlib.Path(folder, str(group.rank)).write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
        "def leave(*_):\n"
        "    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        f"multiring.run(silent, 2, ({str(tmp_path)!r},))\n"
    )
    (tmp_path / "program.py").write_text(program)
    asking = subprocess.Popen([sys.executable, str(tmp_path / "program.py")])
    until = time.monotonic() + 240.0
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.05)
    asking.terminate()
    assert asking.wait(240.0) == 7
    for rank in range(2):
        assert not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


def test_a_terminals_interrupt_counts_once(tmp_path: Path) -> None:
    """It reaches every process of the caller's group."""
    script = tmp_path / "asks.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "import multiring\n"
        "def wait(folder):\n"
        "    here = pathlib.Path(folder) / os.environ['MULTIRING_RANK']\n"
        "    try:\n"
        "        here.write_text('up')\n"
        "        time.sleep(1000)\n"
        "    except KeyboardInterrupt:\n"
        "        time.sleep(1)\n"
        "        here.write_text('saved')\n"
        "        raise\n"
        "if __name__ == '__main__':\n"
        "    multiring.run(wait, 2, (sys.argv[1],))\n"
    )
    folder = tmp_path / "ranks"
    folder.mkdir()
    asking = subprocess.Popen(
        [sys.executable, str(script), str(folder)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(folder, "up")
    os.killpg(asking.pid, signal.SIGINT)
    _, told = asking.communicate(timeout=240)
    assert asking.returncode == -signal.SIGINT, told
    assert "killing" not in told
    wait_for(folder, "saved")


def test_the_launcher_gets_no_signals_of_the_callers_terminal() -> None:
    assert multiring.run(lambda: os.getsid(os.getppid()), 1) != [os.getsid(0)]


def wait_for(folder: Path, text: str) -> None:
    deadline = time.monotonic() + 240
    while [file.read_text() for file in folder.iterdir()] != [text] * 2:
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
