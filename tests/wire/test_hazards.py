"""Misuse of arenas, forks and handles must not corrupt data or hang."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.held_locks import CHILD_S, all_locks_taken_elsewhere, forked
from tests.support.ranks import Here, Process, report_of, run_ranks

import multiring
from multiring._frontend import lifecycle
from multiring._runtime.group.handles import SteppedHandle, in_background
from multiring._runtime.group.point_to_point import AnySourceMatching
from multiring._runtime.named.named import NamedOperations
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
    report = report_of(raise_meanwhile, 2, deadline_s=240, process=Process(ends_fully=True))
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


def told_by_a_fork(calls: dict[str, Callable[[], object]]) -> list[str]:
    """Return what each call does in a fork of this process; calls after one that does not end are missing."""
    child, reading, writing = forked()
    if child == 0:
        for name, call in calls.items():
            signal.alarm(CHILD_S)
            try:
                call()
            except StateError as error:
                ended = "refused" if "forked from" in str(error) else str(error)
            except Exception as error:  # noqa: BLE001 -- the parent shows it
                ended = repr(error)
            else:
                ended = "done"
            os.write(writing, f"{name} {ended}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read().splitlines()
    os.waitpid(child, 0)
    return told


def use_in_a_fork(here: Here) -> list[str]:
    """Fork while another thread has every lock of multiring; return what the child's calls did."""
    group = here.join()
    named = NamedOperations(group)
    matching = AnySourceMatching(group)
    array, other = np.ones(4), np.ones(4)
    group.all_reduce(array)
    group.all_reduce(array)  # the native core repeats it
    named.submit("used", (), lambda on, label: on.all_reduce_async(array, label=label)).wait()
    plain, messages = group.all_reduce_async(array), 1 - here.rank
    begun = named.submit("begun", (), lambda on, label: on.all_reduce_async(other, label=label))
    received = matching.recv(np.ones(4))
    goes_on = threading.Event()
    steps, background = SteppedHandle(plain.wait), in_background(goes_on.wait, "steps")
    calls = {
        "all_reduce": lambda: group.all_reduce(array),
        "all_reduce_async": lambda: group.all_reduce_async(array),
        "barrier": group.barrier,
        "send": lambda: group.send(array, messages),
        "recv": lambda: group.recv(array, messages),
        "allocate": lambda: group.allocate((4,), "float32"),
        "wait": plain.wait,
        "wait for steps": steps.wait,
        "wait for a thread": background.wait,
        "submit": lambda: named.submit("later", (), lambda on, label: on.barrier_async(label=label)),
        "join": named.join,
        "wait for a name": begun.wait,
        "send to any": lambda: matching.send(array, messages),
        "recv of any": lambda: matching.recv(array),
        "wait for any": received.wait,
        "init": multiring.init,
        "rank": multiring.rank,
        "init of the adapters": lifecycle.init,
        "rank of the adapters": lifecycle.rank,
        "shutdown of the adapters": lifecycle.shutdown,
        "shutdown": multiring.shutdown,
    }
    with all_locks_taken_elsewhere():
        told = told_by_a_fork(calls)
    goes_on.set()
    background.wait()
    steps.wait()
    begun.wait()
    matching.send(array, messages).wait()
    received.wait()
    group.barrier()
    assert len(told) == len(calls), told
    return [line for line in told if not line.endswith(" refused")]


LEFT = ["shutdown of the adapters done", "shutdown done"]  # they leave the parent's job alone


def test_a_fork_of_a_rank_refuses_calls_whatever_other_threads_hold() -> None:
    assert run_ranks(use_in_a_fork, 2) == [LEFT] * 2
