"""`horovod.run` returns results by rank and raises the ranks' errors, both in bounded time."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring._launch import CommandError, pickled_call
from multiring._launch.pickled_call import CallFolder, Failure, Returned, failure_of, outcome_of
from multiring.errors import ArgumentError, LaunchError, PeerLostError, UnsupportedError
from multiring.horovod import run


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit ranks to one computing thread, because other tests use the cores too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def total(base: float, *, factor: float) -> tuple[int, float]:
    group = multiring.init()
    summed = np.array([base * factor + group.rank])
    group.all_reduce(summed)
    return group.rank, float(summed[0])


def test_results_come_by_rank_and_functions_without_a_name_are_sent() -> None:
    offset = 100
    results = run(lambda base, **names: (*total(base, **names), offset), (1.0,), {"factor": 2.0}, num_proc=3)
    assert results == [(rank, 9.0, 100) for rank in range(3)]


def test_a_ranks_error_is_the_cause_and_the_others_are_stopped() -> None:
    def fail() -> None:
        if multiring.init().rank == 1:
            raise ZeroDivisionError("rank one is unhappy")
        time.sleep(1000)

    begin = time.monotonic()
    with pytest.raises(LaunchError, match="one or more processes exited with non-zero status: rank 1 raised") as raised:
        run(fail, num_proc=2)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "rank one is unhappy" in str(raised.value)
    assert time.monotonic() - begin < 60


def test_a_killed_rank_is_told_with_what_the_others_raised() -> None:
    def die() -> None:
        group = multiring.init()
        if group.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()

    with pytest.raises(LaunchError, match=r"exit code 137; ranks \[0"):
        run(die, num_proc=2)


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="cannot be sent to other processes"):
        run(print, (threading.Lock(),))

    def give_lock() -> Any:
        return threading.Lock()

    with pytest.raises(LaunchError, match=r"rank 0 raised\nTraceback[\s\S]*pickle"):
        run(give_lock)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"num_proc": 0}, ArgumentError, "num_proc=0: want at least 1"),
        ({"num_proc": 2, "max_num_proc": 4}, UnsupportedError, "the number of ranks does not change"),
        ({"hosts": "a:1", "hostfile": "f"}, ArgumentError, "both list hosts; pass only one of them"),
        ({"hosts": "nowhere.invalid:2", "num_proc": 2}, LaunchError, "nowhere.invalid: no agent runs there: "),
        ({"hosts": "a:b:c", "num_proc": 2}, ArgumentError, "is not HOST:RANKS"),
        ({"hostfile": "/none"}, ArgumentError, "cannot read the hosts in /none"),
        ({"hosts": "localhost:2", "num_proc": 3}, ArgumentError, "3 ranks, but localhost:2 has places for 2"),
        ({"host_discovery_script": "f"}, UnsupportedError, "pass hosts or hostfile"),
        ({"executable": "/none"}, CommandError, "command not found: '/none'"),
        ({"use_mpi": True}, UnsupportedError, "use_mpi"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        run(print, **options)


def test_older_names_and_options_for_this_machine(tmp_path: Path) -> None:
    def tell() -> str:
        sys.stdout.write("told\n")
        return os.environ["MULTIRING_INIT_TIMEOUT_S"]

    with pytest.warns(DeprecationWarning, match="np is an older name of num_proc"):
        results = run(tell, np=2, hosts="localhost:2", start_timeout=77, output_filename=str(tmp_path / "logs"))
    assert results == ["77", "77"]
    assert (tmp_path / "logs" / "rank-1.out").read_text() == "told\n"


def test_ranks_end_with_the_process_that_asked(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import pathlib, os, sys, time\n"
        "from multiring.horovod import run\n"
        "def wait(folder):\n"
        "    (pathlib.Path(folder) / os.environ['MULTIRING_RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    run(wait, (sys.argv[1],), num_proc=2)\n"
    )
    for number in (signal.SIGKILL, signal.SIGINT):
        folder = tmp_path / number.name
        folder.mkdir()
        asking = subprocess.Popen([sys.executable, str(script), str(folder)], stderr=subprocess.DEVNULL)
        pids = wait_for_pids(folder)
        asking.send_signal(number)
        asking.wait(240)
        assert wait_until_gone(pids), number


def wait_for_pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        texts = [file.read_text() for file in folder.iterdir()]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 240
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- pickles


class UnreadableError(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    failure = failure_of(UnreadableError(1, 2))
    assert failure.error is None
    assert "1 and 2" in failure.text
    assert not failure.is_consequence


def test_consequences_are_known_by_their_causes() -> None:
    lost = RuntimeError("training failed")
    lost.__cause__ = PeerLostError("rank 3 died")
    assert failure_of(lost).is_consequence


def test_without_cloudpickle_a_function_needs_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pickled_call, "_has_cloudpickle", lambda: False)
    call = CallFolder(tmp_path)
    call.send(abs, (-3,), {})
    assert call.call() == 3
    for nameless in (lambda: 1, main_function()):
        with pytest.raises(ArgumentError, match="pip install cloudpickle"):
            call.send(nameless, (), {})


def main_function() -> Any:
    def function() -> None:
        pass

    function.__module__ = "__main__"
    return function


def test_outcomes_are_whole_or_missing(tmp_path: Path) -> None:
    call = CallFolder(tmp_path)
    call.leave(1, Returned([1, 2]))
    call.leave(2, Failure("text", None, is_consequence=False))
    ends = [None if each is None else outcome_of(each) for each in call.outcomes(3)]
    assert ends == [None, Returned([1, 2]), Failure("text", None, is_consequence=False)]
