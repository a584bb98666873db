"""Wrong plans: all ranks change them at the same operation, and pinned plans stay."""

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.ranks import Here, run_ranks

from multiring._collectives import build
from multiring._runtime.rails.watch import CHECK_EVERY, LEAST_BYTES, Watch
from multiring._schedule import Collective, Frame
from multiring.errors import RendezvousError
from multiring.planner import Plan, Task

ELEMENTS = 1 << 20
CHANGES_AT = 3 * CHECK_EVERY  # gathered at the first check, agreed at the second, confirmed at the third
FLAT = build("ring", Frame(collective=Collective.ALL_REDUCE, grid=(3,), order=(0, 1, 2)))
PINNED = Plan(FLAT, "tcp", 1e-9, 1 << 20)


def changes(here: Here, times: float, pinned: Plan | None) -> tuple[list[int], list[bytes]]:
    group = here.join()
    fake = np.array([times, 1.0] + [1e8 if group.rank == 1 else 1e9] * group.size)
    pytest.MonkeyPatch().setattr(Watch, "row", lambda _: fake)
    if pinned is not None:
        group.pin(Task(collective=Collective.ALL_REDUCE, size_bytes=4 * ELEMENTS), pinned)
    seconds, found, sums = None, [], []
    small = np.ones(4, np.float32)
    for number in range(1, CHANGES_AT + 10):
        if number % 50 == 0:
            group.barrier()
        elif number % 3:
            group.all_reduce_async(np.ones(8, np.float32))  # no rank waits for this operation
        else:
            small[:] = 1
            group.all_reduce(small)  # a repeated call
            assert small.tolist() == [group.size] * 4
        now = group.plan_of("all_reduce", ELEMENTS)
        if seconds is not None and now != seconds:
            found.append(number)
        if seconds is None or now != seconds:
            array = np.random.default_rng(group.rank).standard_normal(ELEMENTS, np.float32)
            group.all_reduce(array)
            sums.append(array.tobytes())
        seconds = now
    return found, sums


def test_all_ranks_change_their_plans_at_the_same_operation() -> None:
    first, *others = run_ranks(changes, 3, 3.0, None, engine="tcp")
    assert first[0] == [CHANGES_AT - 1]  # `number` does not count the first large all_reduce
    assert all(each == first for each in others)


def test_what_is_pinned_and_what_is_as_predicted_stays() -> None:
    assert all(found == [] for found, _ in run_ranks(changes, 3, 3.0, PINNED, engine="tcp"))
    assert all(found == [] for found, _ in run_ranks(changes, 3, 1.2, None, engine="tcp"))
    assert all(found == [] for found, _ in run_ranks(changes, 3, 3.0, None, engine="tcp", replan="0"))


def measured(here: Here) -> list[float]:
    group = here.join()
    rows = []
    whole = Watch.row

    def row(watch: Watch) -> NDArray[np.float64]:
        rows.append(whole(watch))
        return rows[-1]

    pytest.MonkeyPatch().setattr(Watch, "row", row)
    array = np.zeros(LEAST_BYTES // 4, np.float32)
    for _ in range(5):
        group.all_reduce(array)
    for _ in range(CHECK_EVERY - 5):
        group.barrier()
    (found,) = rows
    return [float(each) for each in found]


def test_what_operations_took_is_measured_against_what_they_should() -> None:
    for took, predicted, *rates in run_ranks(measured, 2, engine="tcp"):
        assert took > 0
        assert predicted > 0
        assert len(rates) == 2


def refused(here: Here) -> str:
    with pytest.raises(RendezvousError) as raised:
        here.join()
    return str(raised.value)


def test_ranks_that_differ_in_whether_they_plan_again_all_raise() -> None:
    (text,) = set(run_ranks(refused, 2, by_rank=[{"replan": "0"}, {}]))
    assert "ranks [0] have MULTIRING_REPLAN=0" in text


def unwaited(here: Here) -> bool:
    group = here.join()
    if group.rank == 0:  # runs ahead of the others by less than the distance of two checks
        handles = [group.barrier_async() for _ in range(2 * CHECK_EVERY - 1)]
        group.send(np.zeros(1, np.float32), to=1)
    else:
        group.recv(np.zeros(1, np.float32), source=0)
        handles = [group.barrier_async() for _ in range(2 * CHECK_EVERY - 1)]
    for handle in handles:
        handle.wait()
    return True


def test_a_rank_that_begins_a_check_waits_for_nobody() -> None:
    assert run_ranks(unwaited, 2, engine="tcp") == [True, True]
