"""Operations of the nccl engine that start before the ranks have agreed on them, on stand-ins of CUDA and NCCL."""

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.standin.build import built
from tests.standin.loading import reports
from tests.support.cuda_ranks import Hold, OtherArray, device_array, have_time, open_engine, values_of
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring._runtime.group.engine_calls import MOST_AHEAD
from multiring.errors import ArgumentError, CollectiveError, MismatchError, MultiringError

SOON_S = 20.0  # with a loaded machine


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def lead(here: Here) -> tuple[int, int, int]:
    """Return how many operations are on rank 0's device before rank 1 calls any."""
    host, engine, group = open_engine(here)
    found = []
    for count, with_other in ((3, False), (MOST_AHEAD + 9, False), (3, True)):
        other = group.twin() if with_other else None
        before = engine._put
        host.barrier()
        if here.rank == 1:
            host.barrier()  # after rank 0 has looked
        handles = [group.all_reduce_async(device_array(group, np.full(3, each + 1.0))) for each in range(count)]
        if here.rank == 0:
            have_time(lambda before=before, count=count: engine._put - before == count)  # type: ignore[misc]
            found.append(engine._put - before)
            host.barrier()
        for handle in handles:
            handle.wait()
        assert engine._put - before == count
        del other
    assert reports() == []
    return tuple(found)  # type: ignore[return-value]


def test_operations_of_a_lone_group_do_not_wait_for_the_other_ranks() -> None:
    assert run_ranks(lead, 2)[0] == (3, MOST_AHEAD, 0)


def keep_streams_in_order(here: Here) -> None:
    host, engine, group = open_engine(here, delay_us=1000)
    for turn in range(5):
        array = OtherArray(np.full(100, turn + 1.0), here.rank)
        hold = Hold(engine._device.stream)
        handle = group.all_reduce_async(array)
        began = time.monotonic()
        handle.order(array.stream)  # type: ignore[attr-defined]
        found = array.later()
        assert time.monotonic() - began < SOON_S
        assert not found.is_there()
        hold.release()
        assert (found.get() == 2 * (turn + 1)).all()
        handle.wait()
    host.barrier()
    # Memory of the engine is not used again while the caller's stream needs it.
    stream = OtherArray(np.ones(1), here.rank)
    handle = group.all_reduce_async(own := device_array(group, np.full(1000, 3.0)))
    handle.order(stream.stream)  # type: ignore[attr-defined]
    hold = Hold(stream._stream)
    found = stream.copy_of(own)
    del own, handle
    have_time(lambda: False)
    device_array(group, np.full(1000, 7.0))
    have_time(found.is_there)
    hold.release()
    assert (found.get() == 6).all()


def test_a_stream_of_the_caller_waits_for_an_operation() -> None:
    run_ranks(keep_streams_in_order, 2)


# -- disagreements


class Failed:
    """The handle of an operation that its call has refused."""

    def __init__(self, error: MultiringError) -> None:
        self._error = error

    def wait(self, timeout: float | None = None) -> None:
        del timeout
        raise self._error


class Started(NamedTuple):
    handle: Any
    result: Callable[[], Any]
    truth: Any
    is_wrong: bool

    def outcome(self) -> str:
        """Return how the operation ended. If it ended well, its result is right."""
        try:
            self.handle.wait(240)
        except (ArgumentError, MismatchError):
            return "refused"
        except CollectiveError as error:
            assert "had started when the ranks did not agree on an earlier one: " in str(error), error  # noqa: PT017
            return "ended"
        assert self.truth is None or (self.result() == self.truth).all()
        return "right"


def expected(kind: str, size: int, rank: int, seed: int) -> tuple[Any, Any]:
    """Return this rank's array, and what it must find."""
    every: list[Any] = [values_of(each + 10 * seed, (4, 3), "float32") for each in range(size)]
    uneven = [values_of(each + 10 * seed, (each + 1, 3), "float32") for each in range(size)]
    match kind:
        case "all_reduce":
            return every[rank], sum(every)
        case "broadcast":
            return every[rank], every[seed % size]
        case "reduce_scatter":
            rows = np.array_split(np.arange(4), size)
            return every[rank], sum(every)[rows[rank]]
        case "all_gather":
            return every[rank], np.concatenate(every)
        case "uneven":
            return uneven[rank], np.concatenate(uneven)
    return None, None


def start(group: Group, kind: str, array: Any, seed: int, wrong: str) -> tuple[Any, Callable[[], Any]]:
    """Start an operation; return its handle and a function that returns its result."""
    given: Any = None if array is None else device_array(group, array)
    if wrong == "type" and array is not None:
        given = device_array(group, array.astype(np.float64))
    elif wrong == "host" and array is not None:
        given = array
    elif wrong:
        kind = "all_reduce" if kind == "barrier" else "barrier"
        given = device_array(group, np.ones(2)) if kind == "all_reduce" else None
    match kind:
        case "all_reduce":
            return group.all_reduce_async(given), given.get
        case "broadcast":
            return group.broadcast_async(given, seed % group.size), given.get
        case "reduce_scatter":
            handle = group.reduce_scatter_async(given)
            return handle, lambda: handle.wait().get()
        case "barrier":
            return group.barrier_async(), lambda: None
    handle = group.all_gather_async(given)
    return handle, lambda: handle.wait().get()


def disagree(here: Here, seed: int) -> list[str]:
    _, _, group = open_engine(here, delay_us=300, seed=seed)
    dice, own_dice = random.Random(seed), random.Random(f"{seed} {here.rank}")  # noqa: S311 -- not for secrets
    size, found = here.size, []
    pending: list[Started] = []
    for number in range(40):
        kind = dice.choice(["all_reduce"] * 3 + ["broadcast", "reduce_scatter", "all_gather", "uneven", "barrier"])
        wrong = dice.choice(["type", "host", "other"]) if dice.random() < 0.15 else ""
        culprit = dice.randrange(size)
        waits = dice.random() < 0.4
        if own_dice.random() < 0.3:
            time.sleep(own_dice.random() * 0.01)
        array, truth = expected(kind, size, here.rank, number)
        try:
            handle, result = start(group, kind, array, number, wrong if culprit == here.rank else "")
            pending.append(Started(handle, result, truth, bool(wrong)))
        except MultiringError as error:
            pending.append(Started(Failed(error), lambda: None, None, bool(wrong)))
        if waits or number == 39:
            is_calm = len(pending) == 1
            for each in pending:
                found.append(outcome := each.outcome())
                assert (outcome == "refused") == each.is_wrong, (number, kind, wrong, found)
                assert outcome == "right" or each.is_wrong or not is_calm, (number, kind, found)
            pending.clear()
    return found


@pytest.mark.parametrize(("engine", "ranks", "seed"), [("shm", 2, 1), ("shm+tcp", 3, 2)])
def test_operations_on_which_the_ranks_disagree(engine: str, ranks: int, seed: int) -> None:
    first, *others = run_ranks(disagree, ranks, seed, engine=engine)
    assert all(each == first for each in others)
    assert {"right", "refused"} <= set(first)


def end_the_later_ones(here: Here) -> None:
    host, engine, group = open_engine(here)
    if here.rank == 1:
        host.barrier()
    wrong = group.all_reduce_async(device_array(group, np.ones(4 + here.rank)))
    later = group.all_reduce_async(device_array(group, np.ones(3)))
    if here.rank == 0:
        assert have_time(lambda: engine._put == 2)
        host.barrier()
    with pytest.raises(MismatchError, match=r"float64 of shape \(4,\).*; the contents of its arrays are undefined"):
        wrong.wait()
    with pytest.raises(CollectiveError, match="had started when the ranks did not agree on an earlier one"):
        later.wait()
    group.all_reduce(array := device_array(group, [1.0]))
    assert array.get() == 2


def test_operations_that_start_before_a_disagreement_is_known_fail_on_all_ranks() -> None:
    run_ranks(end_the_later_ones, 2)
