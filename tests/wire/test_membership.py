"""Joining and leaving: in any order, repeatedly, in forked processes and with missing ranks."""

import atexit
import gc
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.faults import absent
from tests.support.ranks import ENGINES, Here, report_of, run_ranks

import multiring
from multiring.errors import LaunchError, RendezvousError, StateError


def edge(here: Here) -> list[Any]:
    group = here.join()
    assert multiring.is_initialized()
    assert multiring.world() is group
    found = [multiring.rank(), multiring.size(), multiring.local_rank(), multiring.local_size(), *group.ranks]
    multiring.shutdown()
    assert not multiring.is_initialized()
    return found


@pytest.mark.parametrize(("engine", "local_size"), [("shm", 4), ("tcp", 1), ("shm+tcp", 2)])
def test_public_edge(engine: str, local_size: int) -> None:
    assert run_ranks(edge, 4, engine=engine) == [
        [rank, 4, rank % local_size, local_size, 0, 1, 2, 3] for rank in range(4)
    ]


def shared_memory_only(here: Here) -> str:
    with pytest.raises(LaunchError) as raised:
        here.join(engine="shm")
    return str(raised.value)


def test_shm_between_hosts_is_refused() -> None:
    for text in run_ranks(shared_memory_only, 4, engine="shm+tcp"):
        assert text == "MULTIRING_ENGINE=shm, but the ranks are on 2 hosts: ((0, 1), (2, 3)); want auto"


def alone(_: Here) -> list[Any]:
    """Join without any launcher: there is one rank, and every operation works."""
    for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
        del os.environ[name]
    group = multiring.init()
    array = np.arange(4.0)
    group.all_reduce(array, "average")
    group.broadcast(array)
    group.barrier()
    part = group.subgroup([0])
    assert part is not None
    return [group.size, array.tolist(), group.all_gather(array).tolist(), part.all_to_all(array).tolist()]


def test_no_launcher() -> None:
    (found,) = run_ranks(alone, 1)
    assert found == [1, [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def wrong_moments(here: Here) -> list[str]:
    """Make calls too early, too late or twice; return their errors."""
    told = []

    def note(call: Any) -> None:
        with pytest.raises(StateError) as refused:
            call()
        told.append(str(refused.value))

    for call in (multiring.rank, multiring.size, multiring.local_rank, multiring.local_size, multiring.world):
        note(call)
    multiring.shutdown()  # has no effect before init
    group = here.join(stall_timeout_s=20)
    assert multiring.init() is group  # a second call without arguments, or with equal ones
    assert multiring.init(stall_timeout_s=20) is group
    note(lambda: multiring.init(stall_timeout_s=21, log_moves=True, secret="open"))  # noqa: S106 -- not a secret
    group.barrier()  # the first membership still works
    handle = group.all_reduce_async(np.ones(3))
    handle.wait()
    multiring.shutdown()
    multiring.shutdown()
    handle.wait()
    note(multiring.rank)
    note(group.barrier)
    note(lambda: group.all_reduce(np.ones(3)))
    note(lambda: group.all_reduce([1]))
    return told


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_wrong_moments(engine: str) -> None:
    for told in run_ranks(wrong_moments, 2, engine=engine):
        assert set(told[:5]) == {"multiring is not initialised; call multiring.init() first"}
        assert all(each in told[5] for each in ("stall_timeout_s=21", "stall_timeout_s=20", "log_moves=True"))
        assert "already in a job" in told[5]
        assert "open" not in told[5]
        assert told[6] == told[0]
        assert told[7:] == ["multiring was shut down"] * 3


def forks(here: Here) -> list[str]:
    """Use multiring in a fork of a rank, in several ways. The rank itself continues unharmed."""
    group = here.join()
    array = group.allocate(1000, "float32")
    array[...] = here.rank
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = []
            for call in (multiring.rank, multiring.init, group.barrier, lambda: group.all_reduce(array)):
                try:
                    call()
                except StateError as error:
                    told.append(str(error))
            assert (array == here.rank).all()  # memory stays readable
            multiring.shutdown()
            told.append(str(multiring.is_initialized()))
            os.write(write, "\n".join(told).encode())
        except BaseException:  # noqa: BLE001 -- told to the rank
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    group.all_reduce(array)
    assert (array == sum(range(here.size))).all()
    with os.fdopen(read) as pipe:
        return pipe.read().split("\n")


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_use_after_fork(engine: str) -> None:
    for rank, told in enumerate(run_ranks(forks, 2, engine=engine)):
        assert len(told) == 5, told
        for text in told[:2]:
            assert f"was forked from rank {rank} (process " in text
            assert text.endswith("; only the rank itself may communicate")
        for name, text in zip(("barrier", "all_reduce"), told[2:4], strict=True):
            assert text == f"{name}: this process was forked from a rank; only the rank may communicate"
        assert told[4] == "False"


def worker_exits(here: Here) -> bool:
    """Run Python's exit handlers in a fork: this must not count as the rank's departure."""
    group = here.join()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    total = np.ones(10)
    group.all_reduce(total)
    return bool((total == here.size).all())


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_worker_exits(engine: str) -> None:
    assert run_ranks(worker_exits, 3, engine=engine) == [True] * 3


def usage() -> dict[str, int]:
    """Return this process's numbers of descriptors, threads and mappings. Wait a while for threads to end first."""
    gc.collect()
    own = Path("/proc/self")
    deadline_s = time.monotonic() + 60
    while len(list((own / "task").iterdir())) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return {
        "descriptors": len(list((own / "fd").iterdir())),
        "threads": len(list((own / "task").iterdir())),
        "maps": len((own / "maps").read_text().splitlines()),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def again_and_again(here: Here, times: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Join, work and leave repeatedly; return early and late usage, and early and late resident bytes."""
    early: dict[str, int] = {}
    resident = []
    for turn in range(times):
        group = here.join()
        kept = group.allocate(1 << 13, "float32")
        kept[...] = 1
        group.all_reduce(kept)
        group.all_gather_async(np.ones(3)).wait()
        assert group.all_gather(np.full(2, here.rank)).tolist() == [rank for rank in range(here.size) for _ in range(2)]
        context = group._calls.services.context
        multiring.shutdown()
        assert (kept == here.size).all(), "an array did not survive shutdown"
        kept += 1
        assert context.arena_bytes() == kept.nbytes
        del kept
        assert context.arena_bytes() == 0
        del group, context
        resident.append(resident_bytes())
        if turn == times // 5:
            early = usage()
    return early, usage(), resident[times // 5], resident[-1]


# On two hosts, two ranks share memory and the third is reached by tcp. Each of the two alone needs fewer turns.
@pytest.mark.parametrize(("engine", "ranks", "times"), [("shm", 2, 30), ("tcp", 2, 30), ("shm+tcp", 3, 100)])
def test_again_and_again(engine: str, ranks: int, times: int) -> None:
    for early, late, resident_early, resident_late in run_ranks(again_and_again, ranks, times, engine=engine):
        # The C library occasionally splits its heap's mapping. A leak would add 24 or eighty mappings.
        assert late.pop("maps") - early.pop("maps") < 8
        assert early == late
        assert resident_late - resident_early < 4 << 20


def under_signals(here: Here, times: int) -> int:
    """Join repeatedly under a timer's signals, while the other ranks come late."""
    seen = 0

    def count(_number: int, _frame: object) -> None:
        nonlocal seen
        seen += 1

    signal.signal(signal.SIGALRM, count)
    for _ in range(times):
        if here.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        group = here.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        group.barrier()
        multiring.shutdown()
    return seen


@pytest.mark.parametrize("engine", ENGINES)
def test_signals_do_not_keep_ranks_apart(engine: str) -> None:
    assert run_ranks(under_signals, 4, 20, engine=engine)[0] > 20


def arrays_outlive(here: Here) -> bool:
    """Use an arena array of one membership as an ordinary array in the next; dropping it must free its memory."""
    group = here.join()
    old = group.allocate(1 << 20, "float32")
    old[...] = here.rank
    multiring.shutdown()
    assert (old == here.rank).all()
    group = here.join()
    assert not group._calls.services.context.holds(old.ctypes.data, old.nbytes)
    group.all_reduce(old)
    mapped, before = old.nbytes, resident_bytes()
    del old
    gc.collect()
    return before - resident_bytes() > mapped // 2


def test_arrays_outlive_shutdown() -> None:
    assert run_ranks(arrays_outlive, 2) == [True, True]


def late_shutdown(here: Here) -> bool:
    """Let rank 0 leave while the others still run operations of a group without rank 0."""
    group = here.join()
    rest = group.subgroup(range(1, here.size))
    array = np.full(200_000, 1.0)
    group.all_reduce(array)
    if rest is not None:
        for _ in range(20):
            rest.all_reduce(array, "average")
    multiring.shutdown()
    return bool((array == here.size).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_leaving_early_harms_nobody(engine: str) -> None:
    assert run_ranks(late_shutdown, 4, engine=engine) == [True] * 4


def leave_with_work_in_flight(here: Here, over: Path) -> list[str]:
    """Let the other ranks shut down while they wait for rank 1: the operation in flight fails with an error."""
    group = here.join(stall_warn_s=0.2)
    if here.rank == 1:
        until = time.monotonic() + 100
        while not over.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        return []
    handle = group.all_reduce_async(np.ones(4))
    multiring.shutdown()  # waits stall_warn_s for the operation
    with pytest.raises(StateError) as ended:
        handle.wait()
    over.touch()
    return [str(ended.value)]


def test_shutdown_ends_what_is_in_flight(tmp_path: Path) -> None:
    told, _ = run_ranks(leave_with_work_in_flight, 2, tmp_path / "over")
    assert told == ["all_reduce sum float64 of shape (4,) (operation 1 of the group of 2): multiring was shut down"]


# -- processes that never join


def join(here: Here) -> int:
    return here.join().size


def test_rank_that_never_comes() -> None:
    report = report_of(join, 3, faults=[absent(1)], init_timeout_s=3)
    for outcome in report.outcomes:
        assert isinstance(outcome.error, RendezvousError)
        assert "rank 1" in str(outcome.error)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_wrong_secret(engine: str) -> None:
    own = [{}, {"secret": "another"}, {}]
    report = report_of(join, 3, engine=engine, by_rank=own, init_timeout_s=4)
    for outcome in report.outcomes:
        assert isinstance(outcome.error, RendezvousError)
        assert "secret" in str(outcome.error), outcome.error


def other_version(here: Here) -> int:
    if here.rank == 1:
        from multiring._runtime.bootstrap import rendezvous  # noqa: PLC0415 -- to change it on one rank only

        defaults = rendezvous.Rendezvous.__init__.__kwdefaults__
        assert defaults is not None
        defaults["version"] = "9.9"
    return here.join().size


def test_different_versions() -> None:
    report = report_of(other_version, 2, init_timeout_s=60)
    for outcome in report.outcomes:
        assert isinstance(outcome.error, RendezvousError)
        assert "9.9" in str(outcome.error)
        assert multiring.__version__ in str(outcome.error)


def nothing_left(here: Here) -> list[str]:
    """Fail to join, check that no descriptor is left, and join again."""
    before = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    with pytest.raises(RendezvousError):
        here.join(size=3, init_timeout_s=0.3)
    after = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    group = here.join(job="second", rendezvous=os.environ["MULTIRING_RENDEZVOUS"] + "-second")
    group.barrier()
    return sorted(after - before)


def test_joining_after_a_failure() -> None:
    assert run_ranks(nothing_left, 2) == [[], []]
