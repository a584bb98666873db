"""Small messages within a host go through slots if the rank chooses to; results do not depend on the ranks' choices."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.cases import Case, assert_same, place
from tests.support.faults import kill
from tests.support.ranks import Here, report_of, run_ranks

from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.group.compile import Request
from multiring._schedule import Collective
from multiring.errors import MismatchError, MultiringError, PeerLostError


def met_in_slots(here: Here) -> list[Any]:
    """Return the logs of blocking calls with sizes around the capacity of the slots."""
    group = here.join(log_moves=True)
    group.barrier()  # after this barrier every rank knows the location of the slots
    logs = []
    for dtype, size_bytes in (("float32", 4), ("bfloat16", 1000), ("float64", 4000)):
        case = Case(Collective.ALL_REDUCE, dtype, "average", size_bytes // numpy_dtype(dtype).itemsize, seed=size_bytes)
        array = place(group, case.operand(here.rank, here.size), in_arena=False)
        case.run(group, array)
        plan = group._calls.plan_of(case.request(here.rank, here.size))
        assert_same(array, case.reference(plan, here.rank, here.size), case)
        logs.append((group._calls.latest.log, size_bytes, plan.schedule.algorithm))
    group.all_reduce_async(np.ones(1)).wait()
    logs.append((group._calls.latest.log, 8, "async"))
    return logs


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocking_calls_of_small_arrays_are_lowered_to_an_exchange(ranks: int) -> None:
    for *blocking, asynchronous in run_ranks(met_in_slots, ranks):
        for log, size_bytes, algorithm in blocking:
            assert algorithm == "exchange"
            assert log == [("exchange", 0, 2, size_bytes)]  # the third move, which combines the contributions
        assert [lowering for lowering, *_ in asynchronous[0]] == [None] * 3


def own_choice(here: Here, seed: int) -> int:
    """Run the same operations on all ranks, blocking or not by this rank's own choice; return their number."""
    group, shared, own = here.join(), np.random.default_rng(seed), np.random.default_rng([seed, here.rank])
    half = group.subgroup(list(range(max(here.size - 1, 2))))
    groups = [group] if half is None else [group, half]
    waiting: list[tuple[Any, np.ndarray[Any, Any], float]] = []
    for number in range(400):
        which, count = (
            shared.integers(0, 2),
            int(shared.choice([1, 16, 700, 5000, 20_000], p=[0.3, 0.3, 0.2, 0.1, 0.1])),
        )
        also_barrier = shared.integers(0, 8) == 0
        if which >= len(groups):
            continue
        chosen = groups[which]
        array = np.full(count, float(number + chosen.rank))
        want = number * chosen.size + chosen.size * (chosen.size - 1) / 2
        if also_barrier:
            chosen.barrier()
        if own.integers(0, 2):
            chosen.all_reduce(array)
            assert (array == want).all(), f"operation {number}: {array[0]}, want {want}"
        else:
            waiting.append((chosen.all_reduce_async(array), array, want))
        if own.integers(0, 4) == 0:
            _finish(waiting)
    _finish(waiting)
    return 400


def _finish(waiting: list[tuple[Any, "np.ndarray[Any, Any]", float]]) -> None:
    for handle, array, want in waiting:
        handle.wait()
        assert (array == want).all(), f"{array[0]}, want {want}"
    waiting.clear()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_rank_may_block_or_not_as_it_likes(ranks: int, seed: int) -> None:
    assert run_ranks(own_choice, ranks, seed) == [400] * ranks


def many_threads(here: Here) -> float:
    """Run small blocking calls in several threads at once, each in its own group; return the sum."""
    world = here.join()
    groups = [world.subgroup(list(range(here.size))) for _ in range(4)]
    sums = [0.0] * len(groups)

    def work(index: int) -> None:
        group, array = groups[index], np.zeros(10)
        assert group is not None
        for number in range(200):
            array[:] = number
            group.all_reduce(array)
            sums[index] += array[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sums)


def test_threads_do_not_disturb_each_other() -> None:
    assert run_ranks(many_threads, 3) == [4 * 3 * 199 * 100.0] * 3


def disagree(here: Here) -> list[str]:
    """Let rank 1 call a different operation, in several ways; return the errors of this rank."""
    group = here.join()
    odd = here.rank == 1
    told = []
    for _ in range(2):  # in the second round, every call repeats an earlier one
        mine = np.full(4, 1.0 + here.rank)
        wrong_calls: list[Any] = [
            lambda mine=mine: group.all_reduce(mine, "max" if odd else "sum"),
            lambda mine=mine: group.all_reduce(mine[:3] if odd else mine),
            lambda mine=mine: group.barrier() if odd else group.all_reduce(mine),
            lambda mine=mine: group.all_reduce(np.ones(100_000)) if odd else group.all_reduce(mine),
            lambda mine=mine: group.all_reduce_async(mine.astype(np.float32)).wait() if odd else group.all_reduce(mine),
            lambda mine=mine: group.all_reduce(mine, "xor") if odd else group.barrier(),
        ]
        for call in wrong_calls:
            try:
                call()
            except MultiringError as error:
                told.append(f"{type(error).__name__}: {error}")
            assert (mine == 1 + here.rank).all(), "the input was changed"
            total = np.ones(4)
            group.all_reduce(total)
            assert (total == here.size).all(), "the group is not usable"
    return told


@pytest.mark.parametrize(("engine", "ranks"), [("shm", 2), ("shm", 3), ("tcp", 3), ("shm+tcp", 4)])
def test_ranks_that_differ_are_told_and_go_on(engine: str, ranks: int) -> None:
    for rank, told in enumerate(run_ranks(disagree, ranks, engine=engine)):
        assert len(told) == 12
        for at, text in enumerate(told):
            is_own = rank == 1 and at % 6 == 5
            assert text.startswith("ArgumentError" if is_own else MismatchError.__name__), text
        assert "rank 1: all_reduce max float64 of shape (4,)" in told[0]
        assert "rank 1: barrier" in told[8]


def small_sums(here: Here) -> list[str | None]:
    """Return the lowerings of sums of a few sizes over several hosts; compare each sum with the interpreter."""
    group = here.join(log_moves=True, lower=here.rank != 1)
    ways = []
    for size_bytes in (4, 1000, 20_000):
        case = Case(Collective.ALL_REDUCE, "float32", "average", size_bytes // 4, seed=size_bytes)
        array = place(group, case.operand(here.rank, here.size), in_arena=size_bytes > 1000)
        case.run(group, array)
        plan = group._calls.plan_of(case.request(here.rank, here.size))
        assert_same(array, case.reference(plan, here.rank, here.size), case)
        ways.append(group._calls.latest.log[-1].lowering)
    return ways


@pytest.mark.parametrize(("engine", "ranks"), [("tcp", 3), ("shm+tcp", 4)])
def test_one_rank_that_does_not_put_its_part_into_notes_turns_all_back(engine: str, ranks: int) -> None:
    assert run_ranks(small_sums, ranks, engine=engine) == [[None] * 3] * ranks


def noted_sums(here: Here) -> list[list[Any]]:
    group = here.join(log_moves=True)
    logs = []
    for size_bytes in (4, 1000, 4096):
        group.all_reduce(array := np.full(size_bytes // 4, 1 + here.rank, np.float32))
        assert (array == here.size * (here.size + 1) / 2).all()
        moves = group._calls.plan_of(
            Request(Collective.ALL_REDUCE, "float32", array.size, array.size)
        ).schedule.moves_of(here.rank)
        logs.append(
            [
                group._calls.latest.log,
                [("notes", 0, at, size_bytes * len(move.peers)) for at, move in enumerate(moves.rows())],
            ]
        )
    return logs


@pytest.mark.parametrize(("engine", "ranks"), [("tcp", 3), ("shm+tcp", 4)])
def test_small_sums_between_hosts_travel_in_notes(engine: str, ranks: int) -> None:
    for logs in run_ranks(noted_sums, ranks, engine=engine):
        for log, want in logs:
            assert log == want


def die_meanwhile(here: Here) -> str:
    """Wait for a dying rank in a repeated small call; return the error."""
    group, array = here.join(), np.ones(4)
    for _ in range(10):
        group.all_reduce(array)
        array[:] = 1
    here.reach("warm")
    try:
        for _ in range(1_000_000):
            group.all_reduce(array)
            array[:] = 1
    except PeerLostError as error:
        return str(error)
    return "nothing"


def test_a_death_is_told_to_those_who_wait_in_slots() -> None:
    report = report_of(die_meanwhile, 3, faults=[kill(2).at("warm")])
    for outcome in report.outcomes[:2]:
        assert "rank 2 died" in str(outcome.value), outcome


def come_too_late(here: Here, flag: str) -> list[str]:
    """Let rank 0's third call time out before rank 1 makes its own third call; return the errors."""
    group, array, told = here.join(), np.ones(4), []
    for _ in range(3):
        group.barrier()
    if here.rank == 1:
        while not Path(flag).exists():
            time.sleep(0.01)
    for _ in range(2):
        try:
            group.all_reduce(array)
        except MultiringError as error:
            told.append(type(error).__name__)
            Path(flag).touch()
    return told


def test_who_comes_after_a_stall_is_told_so_in_slots_too(tmp_path: Path) -> None:
    told = run_ranks(come_too_late, 2, str(tmp_path / "stalled"), stall_warn_s=0.2, stall_timeout_s=3)
    assert told == [["StallError"] * 2] * 2


def drop_everything(here: Here) -> int:
    """Drop the handle, array and group of an operation in flight; return how many new arrays it overwrote."""
    world = here.join()
    group = world.subgroup([0, 1])
    assert group is not None
    for _ in range(3):
        group.all_reduce(np.ones(64))
    touched = 0
    if here.rank == 0:
        mine = np.ones(64)
        group.all_reduce_async(mine)
        del mine, group
        gc.collect()
        fresh = [np.zeros(64) for _ in range(50)]
        world.barrier()
        world.barrier()
        touched = sum(bool(each.any()) for each in fresh)
    else:
        world.barrier()
        group.all_reduce(np.ones(64))
        world.barrier()
    return touched


def test_memory_outlives_its_group_until_the_operation_has_ended() -> None:
    assert run_ranks(drop_everything, 2) == [0, 0]


class Interrupted:
    """An array whose reading raises KeyboardInterrupt."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise KeyboardInterrupt

    def __dlpack__(self, **_: Any) -> object:
        raise KeyboardInterrupt


def interrupted_before_posting(here: Here) -> str:
    group, array = here.join(), np.ones(4)
    try:
        group.all_reduce(Interrupted() if here.rank == 0 else array)
    except (KeyboardInterrupt, MismatchError) as error:
        group.all_reduce(array)
        assert (array == here.size).all()
        return type(error).__name__
    return "nothing"


def test_ctrl_c_before_an_operation_is_posted_is_told_to_the_others() -> None:
    assert run_ranks(interrupted_before_posting, 2) == ["KeyboardInterrupt", "MismatchError"]
