"""Groups: handles waited for in any order, several groups at once, and groups of some of the ranks."""

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import CONFORMING, ENGINES, Here, Process, run_ranks

import multiring


def any_order(here: Here) -> bool:
    """Start many operations and wait for them in reverse order; check each result."""
    group = here.join()
    arrays = [np.full(count, float(here.rank + 1)) for count in (1, 1000, 70_000, 300_000, 5)]
    handles = [group.all_reduce_async(array) for array in arrays]
    gathered = group.all_gather_async(np.arange(here.rank + 1))
    scattered = group.reduce_scatter_async(np.ones((here.size, 2)))
    swapped = group.all_to_all_async(np.full(here.size, here.rank))
    barrier = group.barrier_async()
    barrier.wait()
    np.testing.assert_array_equal(swapped.wait(), np.arange(here.size))
    np.testing.assert_array_equal(scattered.wait(), np.full((1, 2), here.size))
    np.testing.assert_array_equal(gathered.wait(), np.concatenate([np.arange(n + 1) for n in range(here.size)]))
    for handle in reversed(handles):
        assert handle.wait() is None
        assert handle.done()
        handle.wait(timeout=0)  # a second wait is allowed
    return all(bool((array == sum(range(1, here.size + 1))).all()) for array in arrays)


@pytest.mark.parametrize(("engine", "ranks"), [*itertools.product(ENGINES, (1, 3, 4)), ("mpi", 3)])
def test_handles_in_any_order(engine: str, ranks: int) -> None:
    assert all(run_ranks(any_order, ranks, engine=engine, process=Process(ends_fully=True)))


def dropped_handles(here: Here) -> bool:
    """Drop all handles and arrays; the runtime must keep the memory until the operations end."""
    group = here.join()
    for count in (10, 100_000) * 20:
        group.all_reduce_async(np.ones(count))
    last = np.ones(10)
    group.all_reduce(last)
    return bool((last == here.size).all())


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_dropped_handles(engine: str) -> None:
    assert all(run_ranks(dropped_handles, 3, engine=engine, process=Process(ends_fully=True)))


def interleaved(here: Here) -> bool:
    """Start the operations of two groups in a different order on each rank."""
    world = here.join()
    first = subgroup(world, range(here.size))
    second = subgroup(world, reversed(range(here.size)))
    assert second.rank == here.size - 1 - here.rank
    for turn in range(10):
        a, b = np.full(1000, 1.0 + turn), np.full(50_000, 2.0)
        order = [(first, a, "sum"), (second, b, "product")]
        handles = [group.all_reduce_async(array, op) for group, array, op in order[:: 1 if here.rank % 2 else -1]]
        for handle in handles:
            handle.wait()
        assert (a == here.size * (1.0 + turn)).all()
        assert (b == 2.0**here.size).all()
    return True


def subgroup(group: multiring.Group, ranks: Any) -> multiring.Group:
    found = group.subgroup(list(ranks))
    assert found is not None
    return found


@pytest.mark.parametrize("engine", CONFORMING)
def test_two_groups_interleaved(engine: str) -> None:
    assert all(run_ranks(interleaved, 4, engine=engine))


def parts(here: Here) -> list[Any]:
    """Split the world into two groups, and the first group again; check that each sum stays within its group."""
    world = here.join()
    low, high = world.subgroup([1, 0]), world.subgroup([2, 3, 4])
    own = low or high
    assert own is not None
    assert (low is None) == (here.rank >= 2)
    total = np.array([2.0**here.rank])
    own.all_reduce(total)
    root_says = np.array([here.rank])
    own.broadcast(root_says, root=own.size - 1)
    gathered = own.all_gather(np.array([here.rank]))
    alone = own.subgroup([0])
    if alone is not None:
        alone.all_reduce(total, "average")
    if own.rank == 0:
        own.send(np.array([here.rank + 100]), own.size - 1)
    if own.rank == own.size - 1:
        own.recv(root_says, 0)
    world.barrier()
    return [own.ranks, own.rank, total.item(), root_says.item(), gathered.tolist()]


@pytest.mark.parametrize("engine", CONFORMING)
def test_parts_of_the_world(engine: str) -> None:
    assert run_ranks(parts, 5, engine=engine) == [
        [(1, 0), 1, 3.0, 101, [1, 0]],
        [(1, 0), 0, 3.0, 0, [1, 0]],
        [(2, 3, 4), 0, 28.0, 4, [2, 3, 4]],
        [(2, 3, 4), 1, 28.0, 4, [2, 3, 4]],
        [(2, 3, 4), 2, 28.0, 102, [2, 3, 4]],
    ]


def two_threads(here: Here) -> bool:
    """Let each of two threads make blocking calls in its own group."""
    world = here.join()
    groups = [subgroup(world, range(here.size)) for _ in range(2)]
    totals = [np.ones(2000), np.full(3, 2.0)]

    def work(index: int) -> None:
        for _ in range(50):
            groups[index].all_reduce(totals[index], "average")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bool((totals[0] == 1).all() and (totals[1] == 2).all())


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_two_threads(engine: str) -> None:
    assert all(run_ranks(two_threads, 2, engine=engine))


def meet_at_barrier(here: Here) -> tuple[float, float]:
    group = here.join()
    time.sleep(0.1 * here.rank)
    arrived = time.monotonic()
    group.barrier()
    return arrived, time.monotonic()


@pytest.mark.parametrize("engine", CONFORMING)
def test_nobody_leaves_a_barrier_early(engine: str) -> None:
    times = run_ranks(meet_at_barrier, 4, engine=engine)
    assert max(arrived for arrived, _ in times) <= min(left for _, left in times)


def large_and_crossed(here: Here) -> bool:
    """Start large operations of two groups in opposite orders; neither may block the other."""
    world = here.join()
    groups = [subgroup(world, range(here.size)) for _ in range(2)]
    for _ in range(10):
        arrays = [np.full(1_000_000, 1.0, np.float32) for _ in groups]
        order = (0, 1) if here.rank % 2 else (1, 0)
        handles = [groups[index].all_reduce_async(arrays[index]) for index in order]
        for handle in handles:
            handle.wait()
        assert all((array == here.size).all() for array in arrays)
    return True


@pytest.mark.parametrize("engine", ["shm", "tcp", "shm copying"])
def test_large_operations_of_two_groups(engine: str) -> None:
    way: dict[str, Any] = {"engine": engine.split(maxsplit=1)[0], "read_peers": engine != "shm copying"}
    assert all(run_ranks(large_and_crossed, 3, **way))


def unposted(here: Here) -> bool:
    """Show that a large operation which the other rank has not started yet does not block other operations."""
    world = here.join()
    other = subgroup(world, range(here.size))
    large, letter, small = np.ones(2_000_000), np.ones(2_000_000), np.ones(1000)
    if here.rank == 0:
        handle = other.all_reduce_async(large)
        message = other.send_async(letter, 1)
    for _ in range(20):
        world.all_reduce(small, "average")
    if here.rank == 1:
        message = other.recv_async(letter, 0)
        handle = other.all_reduce_async(large)
    message.wait()
    handle.wait()
    return bool((large == here.size).all() and (small == 1).all())


@pytest.mark.parametrize("engine", CONFORMING)
def test_unposted_operation_blocks_nothing(engine: str) -> None:
    assert all(run_ranks(unposted, 2, engine=engine))
