"""Misuse of arenas, forks and handles must not corrupt data or hang."""

import gc
import os
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, Process, report_of, run_ranks

from multiring.errors import ArgumentError, StateError


def drop_in_a_child(here: Here) -> tuple[float, str]:
    """Fork a child that drops an arena array and allocates another; return the parent's sum and the child's error."""
    group = here.join()
    table = group.allocate(1 << 20, "float32")
    table[:] = 1
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = "nothing"
        try:
            del table
            gc.collect()
            group.allocate(10, "float32")
        except StateError as error:
            told = type(error).__name__
        os.write(writing, told.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    told = os.read(reading, 100).decode()
    os.close(reading)
    return float(table.sum()), told


def test_a_forked_worker_cannot_free_or_take_the_ranks_memory() -> None:
    assert run_ranks(drop_in_a_child, 2, process=Process(ends_fully=True)) == [(float(1 << 20), "StateError")] * 2


def cross_two_groups(here: Here) -> list[int]:
    """Start all_gathers of two groups, in a different order on each rank."""
    world = here.join(stall_timeout_s=20)
    groups = [world.subgroup([0, 1]), world.subgroup([1, 0])]
    order = groups if here.rank == 0 else groups[::-1]
    handles = {}
    for group in order:
        assert group is not None
        handles[group.ranks] = group.all_gather_async(np.full(2, here.rank))
        handles[group.ranks].wait() if here.rank == 0 and group is order[1] else time.sleep(0.05)
    return [len(handle.wait()) for handle in handles.values()]


def test_groups_do_not_wait_for_each_other() -> None:
    assert run_ranks(cross_two_groups, 2) == [[4, 4]] * 2


def raise_meanwhile(here: Here) -> None:
    """Let rank 0 raise an error while an operation of several steps is open."""
    group = here.join()
    if here.rank == 0:
        group.all_gather_async(np.ones(3))
        raise RuntimeError("boom")
    group.recv(np.ones(3), 0)


def test_an_open_operation_of_several_steps_keeps_no_rank_alive() -> None:
    report = report_of(raise_meanwhile, 2, deadline_s=30, process=Process(ends_fully=True))
    assert "boom" in str(report.outcomes[0].error)
    assert "rank 0" in str(report.outcomes[1].error)


def overlapping(here: Here) -> list[str]:
    """Ask for results in the operand's own memory; return the errors."""
    group = here.join()
    array = group.allocate((6, 2), "float32")
    array[:] = 1
    next_own = 2 * ((here.rank + 1) % here.size)  # the rank's own part would be allowed
    told = []
    calls: list[Any] = [
        lambda: group.reduce_scatter(array, out=array[2 * here.rank : 2 * here.rank + 2]),
        lambda: group.all_to_all(array, out=array),
        lambda: group.all_gather(array[next_own : next_own + 2], out=array),
    ]
    for call in calls:
        with pytest.raises(ArgumentError) as raised:
            call()
        told.append(str(raised.value))
    assert (array == 1).all()
    return told


def test_results_may_not_share_memory_with_operands() -> None:
    for told in run_ranks(overlapping, 3):
        assert all("shares memory" in text for text in told)


def wrong_settings(here: Here) -> list[str]:
    """Call init with invalid settings; return the errors."""
    wrong: list[dict[str, Any]] = [{"foo": 1}, {"stall_timeout_s": "abc"}, {"stall_timeout_s": -1}, {"ports": (9, 1)}]
    told = []
    for changes in wrong:
        with pytest.raises(ArgumentError) as raised:
            here.join(**changes)
        told.append(str(raised.value))
    here.join(ports=(0, 0), stall_timeout_s=20).barrier()
    return told


def test_settings_given_to_init_are_checked_like_the_environments() -> None:
    for unknown, text, negative, ports in run_ranks(wrong_settings, 2):
        assert unknown.startswith("unknown setting foo=1; known are ")
        assert text == "stall_timeout_s='abc': want seconds > 0; 1000000000 and more mean never"
        assert negative == "stall_timeout_s='-1': want seconds > 0; 1000000000 and more mean never"
        assert ports == "ports='9-1': want FIRST-LAST, 0 to 65535"


def leave_with_a_full_ring(here: Here) -> int:
    """Let rank 0 finish and leave before rank 1 has read most of rank 0's messages."""
    group = here.join()
    handles = [group.barrier_async() for _ in range(600)]
    if here.rank == 1:
        here.reach("posted")
        time.sleep(0.5)
    for handle in handles:
        handle.wait()
    return len(handles)


def test_leaving_loses_nothing_that_was_said() -> None:
    assert run_ranks(leave_with_a_full_ring, 2, process=Process(ends_fully=True)) == [600, 600]
