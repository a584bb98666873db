"""Ranks die in every situation: each survivor is told at once which rank died, and nothing is left behind.

The long form, with hundreds of deaths under `multiring run`, is benchmarks/evidence/jobs/main.py.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.faults import kill
from tests.support.ranks import Here, Report, report_of

import multiring
from multiring.errors import MultiringError, PeerLostError, RendezvousError

TOLD_S = 60.0  # a survivor gets the error within milliseconds, and ends a busy machine's while later
MEMORY = "/dev/shm/"  # noqa: S108 -- where leftovers would be
STAGES = ("init", "collective", "messages", "barrier", "shutdown")


def live(here: Here, stage: str, workers: int) -> tuple[str, str, float]:
    """Run to `stage`, where one rank dies; return the error's type and text and the host's clock."""
    if stage == "init":
        here.reach(stage)
    try:
        # A rank that dies before it has come is waited for until this time is over; at other stages, all come.
        group = here.join(init_timeout_s=3 if stage == "init" else 100)
        children = [fork_a_worker() for _ in range(workers)]
        if stage == "init":
            group.barrier()
        try:
            reach(here, group, stage)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    except MultiringError as error:
        return type(error).__name__, str(error), time.monotonic()
    return "", "", time.monotonic()


def fork_a_worker() -> int:
    """Fork a process like a data loader's worker, with all descriptors of its parent."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def reach(here: Here, group: multiring.Group, stage: str) -> None:
    array = np.ones(300_000, np.float32)
    group.all_reduce(array)
    if stage == "shutdown":
        here.reach(stage)
        multiring.shutdown()
        time.sleep(0.3)
        return
    here.reach(stage)
    until = time.monotonic() + 240
    while time.monotonic() < until:
        if stage == "collective":
            group.all_reduce(array, "average")
        elif stage == "barrier":
            group.barrier()
        elif stage == "messages":
            handle = group.recv_async(array, (group.rank - 1) % group.size)
            group.send(np.ones(300_000, np.float32), (group.rank + 1) % group.size)
            handle.wait()


def kinds(report: Report, victim: int, *, named: bool = True) -> list[Any]:
    """Check the error of every survivor of `victim`; return the types of the errors.

    With `named=False`, a survivor that waits only for another survivor may get the departure of that one instead.
    """
    dead = report.outcomes[victim]
    assert dead.exit_code == -signal.SIGKILL
    found = []
    for outcome in report.outcomes:
        if outcome is dead:
            continue
        assert outcome.error is None, outcome
        assert outcome.ended_s - dead.ended_s < TOLD_S
        kind, text, _ = outcome.value
        found.append(kind)
        if kind and named:
            assert f"rank {victim}" in text, text
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("engine", "ranks"), [("shm", 2), ("shm", 3), ("tcp", 3), ("shm+tcp", 4)])
@pytest.mark.parametrize("stage", ["collective", "messages", "barrier"])
def test_death_at_work(stage: str, engine: str, ranks: int, workers: int) -> None:
    victim = (ranks + workers) % ranks
    fault = kill(victim).at(stage).after(0.05)
    report = report_of(live, ranks, stage, workers, engine=engine, faults=[fault])
    assert kinds(report, victim, named=stage != "messages") == [PeerLostError.__name__] * (ranks - 1)
    assert report.orphans == workers  # the dead rank's own workers


@pytest.mark.parametrize(("engine", "victim"), [("shm", 0), ("shm", 1), ("tcp", 0), ("tcp", 1)])
def test_death_in_init(engine: str, victim: int) -> None:
    """The rank dies at different points of init: in the rendezvous, while memory is mapped, or after that."""
    for delay_s in (0, 0.006, 0.02):
        report = report_of(live, 3, "init", 0, engine=engine, faults=[kill(victim).at("init").after(delay_s)])
        for kind in kinds(report, victim):
            assert kind in (RendezvousError.__name__, PeerLostError.__name__)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_death_in_shutdown(engine: str) -> None:
    """Ranks that have already left see no error."""
    report = report_of(live, 3, "shutdown", 0, engine=engine, faults=[kill(1).at("shutdown").after(0.002)])
    assert kinds(report, 1) == ["", ""]


def test_two_deaths_at_once() -> None:
    faults = [kill(0).at("collective").after(0.05), kill(2).at("collective").after(0.05)]
    report = report_of(live, 4, "collective", 0, faults=faults)
    for outcome in (report.outcomes[1], report.outcomes[3]):
        kind, text, _ = outcome.value
        assert kind == PeerLostError.__name__
        assert "rank 0 died" in text or "rank 2 died" in text


def sockets() -> dict[str, int]:
    """Return multiring's abstract Unix sockets and all TCP sockets outside TIME_WAIT, as name -> inode."""
    unix = {line.split()[-1]: int(line.split()[6]) for line in rows("unix") if "@multiring" in line}
    time_wait = "06"
    tcp = {
        " ".join(line.split()[1:4]): int(line.split()[9]) for line in rows("tcp")[1:] if line.split()[3] != time_wait
    }
    return unix | tcp


def rows(protocol: str) -> list[str]:
    return Path(f"/proc/net/{protocol}").read_text().splitlines()


def held() -> set[int]:
    """Return the inodes of all sockets that processes hold open."""
    inodes = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has just ended
            kind, _, inode = str(entry.readlink()).partition(":[")
            if kind == "socket":
                inodes.add(int(inode.removesuffix("]")))
    return inodes


def files() -> set[str]:
    """Return the files in shared memory, without those of MPI jobs, which concurrent tests may run."""
    found = {entry.name for entry in Path(MEMORY).iterdir()}
    return {name for name in found if not name.startswith(("mpich_shm", "sm_segment"))}


def in_use() -> set[str]:
    """Return the files in shared memory that processes have mapped or hold open: other jobs than this test's."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has just ended
            names |= {Path(line.split(maxsplit=5)[5]).name for line in maps.read_text().splitlines() if MEMORY in line}
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            names |= {Path(target).name} if target.startswith(MEMORY) else set()
    return names


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_nothing_is_left(engine: str) -> None:
    sockets_before, files_before = sockets(), files()
    report = report_of(live, 3, "collective", 1, engine=engine, faults=[kill(1).at("collective").after(0.03)])
    assert report.orphans == 1
    # All processes of this job have ended, so sockets that are still held belong to concurrent tests.
    now, elsewhere = sockets(), held()
    left = {name for name, inode in now.items() if name not in sockets_before and inode not in elsewhere}
    left |= files() - files_before - in_use()
    deadline = time.monotonic() + 240
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= sockets().keys() | files() - in_use()
    assert not left
