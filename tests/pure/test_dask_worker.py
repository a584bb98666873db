"""What a Dask worker knows of a job: a rank runs once, and nothing stays of a job whose driver has died."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from multiring._launch.cluster_ranks import ClusterRendezvous, positions_of
from multiring._launch.cluster_worker import facts_here
from multiring._launch.first_failure import Ended, end_in
from multiring._launch.pickled_call import Returned, pickled_outcome
from multiring.dask import worker

JOB = "dask-test"
POSITION = positions_of([facts_here("w")])[0]
LONG_S = 240.0


class Keeper:
    """Keeps no process: its rank runs until it is stopped or `has_ended` is set."""

    count = 0
    has_ended = threading.Event()

    def __init__(self, *_: object) -> None:
        Keeper.count += 1

    def stop(self) -> None:
        self.has_ended.set()

    def run(self, _is_wanted: Callable[[], bool]) -> bytes:
        assert self.has_ended.wait(LONG_S)
        return pickled_outcome(Returned(7))


@pytest.fixture(autouse=True)
def keepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace processes and Dask."""
    Keeper.count, Keeper.has_ended = 0, threading.Event()
    monkeypatch.setattr(worker, "RankKeeper", Keeper)
    monkeypatch.setattr(worker, "_is_wanted", lambda: lambda: True)
    yield
    Keeper.has_ended.set()
    until = time.monotonic() + LONG_S
    while worker.end_job(JOB) and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker._jobs
    assert not worker._reserved
    assert not worker._timers


def begin(patience_s: float) -> tuple[str, int]:
    """Do what the driver does before the ranks' tasks, and return the reserved address and port."""
    told = worker.reserve(JOB, {}, patience_s, is_one_host=True)
    worker.prepare(b"", ClusterRendezvous(**told, secret="s" * 64, job=JOB), {}, patience_s)
    return told["torch_address"], told["torch_port"]


def is_taken(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(address)
        except OSError:
            return True
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def kept() -> tuple[threading.Thread, list[bytes]]:
    """Run the task of the rank in a thread."""
    ends: list[bytes] = []
    thread = threading.Thread(target=lambda: ends.append(worker.keep_rank(JOB, POSITION)))
    thread.start()
    wait_until(lambda: worker.started(JOB) == {0})
    return thread, ends


def test_a_rank_whose_task_comes_twice_runs_once() -> None:
    begin(LONG_S)
    thread, ends = kept()
    again = end_in(worker.keep_rank(JOB, POSITION))
    assert isinstance(again, Ended)
    assert "Dask has sent its task twice" in again.text
    Keeper.has_ended.set()
    thread.join()
    assert end_in(ends[0]) == Returned(7)
    assert isinstance(end_in(worker.keep_rank(JOB, POSITION)), Ended)
    assert Keeper.count == 1


def test_no_rank_starts_after_the_drivers_end_of_the_job() -> None:
    """Also while another rank of the job still runs on the same worker."""
    begin(LONG_S)
    thread, _ = kept()
    worker._jobs[JOB].keepers[0].stop = lambda: None  # type: ignore[method-assign] # the rank takes its time
    assert worker.end_job(JOB) == 1
    late = end_in(worker.keep_rank(JOB, replace(POSITION, rank=1)))
    assert late == Ended("was not started: the job is over")
    assert Keeper.count == 1
    Keeper.has_ended.set()
    thread.join()


def time_is_up() -> None:
    """Act as if the patience with the driver were over: the timer of the job does the same later."""
    timer = worker._timers[JOB]
    assert timer.is_alive()
    timer.function(*timer.args)


def test_a_driver_that_died_before_the_ranks_leaves_no_port_and_no_job() -> None:
    address = begin(LONG_S)
    assert is_taken(address)
    time_is_up()
    assert not worker._jobs
    assert not is_taken(address)
    assert not worker._reserved
    late = end_in(worker.keep_rank(JOB, POSITION))
    assert isinstance(late, Ended)
    assert "does not know the job" in late.text


def test_a_driver_that_died_in_the_middle_leaves_no_port_and_no_job() -> None:
    address = begin(LONG_S)
    thread, _ = kept()
    time_is_up()
    assert worker._jobs
    assert is_taken(address)
    Keeper.has_ended.set()  # as when the scheduler does not want the task any more
    thread.join()
    time_is_up()
    assert not worker._jobs
    assert not is_taken(address)


def test_a_driver_that_died_is_noticed_by_the_clock() -> None:
    address = begin(0.05)
    wait_until(lambda: not worker._jobs)
    assert not is_taken(address)


def test_the_drivers_end_of_a_job_is_immediate() -> None:
    address = begin(LONG_S)
    thread, _ = kept()
    assert worker.end_job(JOB) == 1
    thread.join()
    assert worker.end_job(JOB) == 0
    assert not is_taken(address)
