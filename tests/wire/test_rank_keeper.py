"""Ranks that a cluster's worker keeps: their results, their ends, and nothing left behind; without any cluster."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import cluster_programs as programs
from tests.support.free_ports import free_ports

from multiring._launch.cluster_ranks import ClusterRendezvous, positions_of
from multiring._launch.cluster_worker import ReservedPlace, draw_job_name, draw_secret, facts_here
from multiring._launch.first_failure import Ended, end_in
from multiring._launch.leftovers import job_processes
from multiring._launch.pickled_call import Failure, Outcome, Returned, pickled_call
from multiring._launch.rank_keeper import RankKeeper
from multiring.errors import LaunchError

DEADLINE_S = 240.0
# A worker that keeps one rank, which waits. The worker prints the job's name.
WORKER = """
from multiring._launch.cluster_ranks import ClusterRendezvous, positions_of
from multiring._launch.cluster_worker import ReservedPlace, draw_job_name, draw_secret, facts_here
from multiring._launch.pickled_call import pickled_call
from multiring._launch.rank_keeper import RankKeeper
from tests.support import cluster_programs as programs

place = ClusterRendezvous(**ReservedPlace({}, is_one_host=True).told, secret=draw_secret(), job=draw_job_name("test"))
print(place.job, flush=True)
RankKeeper(pickled_call(programs.leave_children, (-1,), {}), positions_of([facts_here("w")])[0], place, {}).run()
"""


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit ranks to one computing thread, because other tests use the cores too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Kept:
    """Ranks of one job on this host, each kept by a thread."""

    def __init__(self, ranks: int, function: Callable[..., Any], *args: Any, **variables: str) -> None:
        self._reserved = ReservedPlace({}, is_one_host=True)
        self.place = ClusterRendezvous(**self._reserved.told, secret=draw_secret(), job=draw_job_name("test"))
        positions = positions_of([facts_here(f"worker {rank}") for rank in range(ranks)])
        call = pickled_call(function, args, {})
        self.keepers = [RankKeeper(call, position, self.place, variables) for position in positions]
        self.ends: dict[int, Outcome | Ended] = {}
        self.wanted = True
        self._threads = [threading.Thread(target=self._keep, args=(rank,)) for rank in range(ranks)]
        for thread in self._threads:
            thread.start()

    def _keep(self, rank: int) -> None:
        self.ends[rank] = end_in(self.keepers[rank].run(lambda: self.wanted))

    def wait(self) -> Sequence[Outcome | Ended]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
        self._reserved.release()
        assert not job_processes(self.place.job)
        return [self.ends[rank] for rank in range(len(self.keepers))]

    def wait_for_ranks(self, count: int) -> None:
        until = time.monotonic() + DEADLINE_S
        while len(job_processes(self.place.job)) < count:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_ranks_return_their_values_and_see_their_variables() -> None:
    first, second = Kept(2, programs.tell_place, SPICE="salt").wait()
    assert first == Returned((0, 2, "salt"))
    assert second == Returned((1, 2, "salt"))


def test_an_error_is_an_outcome_with_its_traceback() -> None:
    first, second = Kept(2, programs.raise_while_others_reduce, 1).wait()
    assert isinstance(second, Failure)
    assert isinstance(second.error, ZeroDivisionError)
    assert "raise ZeroDivisionError" in second.text
    assert isinstance(first, Failure)
    assert first.is_consequence


@pytest.mark.parametrize("way", ["stop", "not wanted"])
def test_a_stopped_rank_ends_with_the_processes_that_it_started(way: str) -> None:
    kept = Kept(1, programs.leave_children, -1)
    kept.wait_for_ranks(2)  # the rank and its child
    begin = time.monotonic()
    if way == "stop":
        kept.keepers[0].stop()
    else:
        kept.wanted = False
    (end,) = kept.wait()
    assert isinstance(end, Ended)
    assert time.monotonic() - begin < 200


def test_a_killed_rank_is_named_with_its_signal() -> None:
    (end,) = Kept(1, programs.be_killed, 0).wait()
    assert end == Ended("was killed by SIGKILL")


def test_a_killed_worker_takes_the_rank_and_its_children_along() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    job = worker.stdout.readline().strip()
    until = time.monotonic() + DEADLINE_S
    while len(job_processes(job)) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    until = time.monotonic() + 240
    while job_processes(job):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_secret_is_on_no_command_line_and_in_no_file() -> None:
    kept = Kept(2, programs.find_secret, ["/dev/shm"])  # noqa: S108 -- searched
    assert kept.wait() == [Returned([]), Returned([])]


def test_a_reserved_port_is_free_for_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_INTERFACE", "127.0.0.1")
    first = free_ports(2)
    second = first + 1
    reserved = ReservedPlace({"MULTIRING_PORTS": f"{first}-{second}"}, is_one_host=False)
    assert reserved.rendezvous == f"127.0.0.1:{first}"
    assert reserved.torch_port == second
    with pytest.raises(LaunchError, match=f"no port of {first}-{first}"):
        ReservedPlace({"MULTIRING_PORTS": f"{first}-{first}"}, is_one_host=False)
    reserved.release()


def test_the_watchdog_of_an_actors_rank_ends_its_processes(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "watchdog = [sys.executable, '-m', 'multiring._launch.rank_watchdog', 'job-x', '3']\n"
        "subprocess.Popen(watchdog, stdin=subprocess.PIPE)\n"
        "os.environ.update(MULTIRING_JOB='job-x', MULTIRING_RANK='3')\n"
        "child = subprocess.Popen(['/bin/sleep', '1000'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 240
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
