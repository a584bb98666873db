"""The staged engine on stand-ins of CUDA: which ranks take it, values, orderings, failures."""

import ctypes
import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.standin.build import built
from tests.standin.loading import load, runtime
from tests.support.cuda_ranks import RANKS_PER_HOST, Hold, OtherArray, device_array, have_time, new_stream
from tests.support.lateness import stretched, tries
from tests.support.orderings import without
from tests.support.ranks import Here, report_of, run_ranks
from tests.wire.test_nccl_engine import check_values, require_refusal_in_a_fork

from multiring import Group
from multiring._runtime.engines import staged
from multiring._runtime.engines.cuda_driver import CudaDriver, CudaError
from multiring._runtime.engines.pinned_memory import PinnedBlock
from multiring.errors import ArgumentError, CollectiveError, MismatchError, PeerLostError, UnsupportedError

OLD_NCCL = 21700
LATE_US = 20_000
OUT_OF_MEMORY = 2
SEEDS = range(5)
PATIENCE_S = 1.0
FILE = "_runtime/engines/staged.py"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def open_group(here: Here, *, shares: bool = False, **settings: object) -> tuple[Group, Group]:
    """Return the groups in host memory and on devices. With `shares`, the ranks of a host have its first device."""
    per_host = RANKS_PER_HOST[here.engine]
    host = here.join()
    load(devices=4, **{"host": here.rank // per_host, "nccl": 22809 if shares else OLD_NCCL, **settings})
    return host, host.on_device(0 if shares else here.rank % min(per_host, 4))


def engine_of(group: Group) -> Any:
    return group.calls.engine


# ---- values ----


def compute(here: Here, shares: bool) -> set[str]:  # noqa: FBT001 -- an argument of `run_ranks`
    host, group = open_group(here, shares=shares, delay_us=300)
    check_values(group, device_array)
    # What NCCL refuses
    group.all_reduce(found := device_array(group, np.full(3, here.rank, np.int16)))
    assert (found.get() == sum(range(here.size))).all()
    group.all_reduce(found := device_array(group, np.full(3, 2, np.int32)), "average")
    assert (found.get() == 2).all()
    group.all_reduce(found := device_array(group, np.ones(1 << 18, np.float32)), wire="bf16")
    assert (found.get() == here.size).all()
    twin = group.twin()
    kept = []
    for turn in range(6):
        for each in (group, twin) if (turn + here.rank) % 2 else (twin, group):
            kept.append((each.all_reduce_async(found := device_array(each, [turn + 1.0])), found, turn))
            each.broadcast_async(device_array(each, [1.0]))
    for handle, found, turn in kept:
        handle.wait()
        assert found.get() == (turn + 1) * here.size
    pair = group.subgroup([here.size - 1, 0])
    if pair is not None:
        pair.all_reduce(found := device_array(pair, [1]))
        assert found.get() == 2
    if here.engine == "shm":
        group.all_reduce(other := OtherArray(np.full(5, here.rank + 1.0), 0 if shares else here.rank))
        assert (other.now() == sum(range(1, here.size + 1))).all()
    for _ in range(3):
        ordered: Any = group.all_reduce_async(found := device_array(group, np.ones(9)))
        copied = (other := OtherArray(np.ones(9), 0 if shares else here.rank % RANKS_PER_HOST[here.engine])).stream
        ordered.order(copied)
        assert (other.copy_of(found).get() == here.size).all()
    host.barrier()
    return {plan.engine for plan in group.plans.values()}


@pytest.mark.parametrize(
    ("engine", "ranks", "shares"), [("shm", 2, True), ("shm", 2, False), ("tcp", 2, False), ("shm+tcp", 4, True)]
)
def test_collectives_through_host_memory(engine: str, ranks: int, *, shares: bool) -> None:
    assert run_ranks(compute, ranks, shares, engine=engine) == [{"staged"}] * ranks


# ---- choice ----


def choose(here: Here, wishes: tuple[str, str]) -> str:
    os.environ["MULTIRING_DEVICE_PATH"] = wishes[here.rank]
    host = here.join()
    load(devices=2, host=here.rank if here.engine == "tcp" else 0)
    device = 0 if here.engine == "tcp" else here.rank
    try:
        found: str = engine_of(host.on_device(device)).name
    except (CollectiveError, UnsupportedError) as error:
        found = str(error)
    host.barrier()
    return found


def test_the_setting_decides() -> None:
    assert run_ranks(choose, 2, ("auto", "auto")) == ["nccl"] * 2
    assert run_ranks(choose, 2, ("staged", "staged")) == ["staged"] * 2
    assert run_ranks(choose, 2, ("hierarchical", "hierarchical")) == ["nccl"] * 2
    for text in run_ranks(choose, 2, ("staged", "auto")):
        assert "MULTIRING_DEVICE_PATH: rank 0: staged; rank 1: auto" in text
    for text in run_ranks(choose, 2, ("hierarchical", "hierarchical"), engine="tcp"):
        assert "hierarchical on several hosts is not served by Group.on_device" in text


def wish(here: Here) -> None:
    os.environ["MULTIRING_DEVICE_PATH"] = "nccl"
    with pytest.raises(CollectiveError, match="both on CUDA device"):
        open_group(here, shares=True)


def test_a_wish_for_nccl_that_cannot_be() -> None:
    run_ranks(wish, 2)


# ---- failures ----


def fail(here: Here) -> None:
    host, group = open_group(here, shares=True, memory_mb=64)
    array = device_array(group, np.ones(4, np.float32))
    with pytest.raises(MismatchError, match="float32 of shape"):
        group.all_reduce(array if here.rank else device_array(group, np.ones(5, np.float32)))
    with pytest.raises(ArgumentError if here.rank == 0 else MismatchError, match="is not in device memory"):
        group.all_reduce(np.ones(4, np.float32) if here.rank == 0 else array)
    with pytest.raises(ArgumentError, match="device=9: want 0 to 3"):
        host.on_device(9)
    # One rank cannot pin memory.
    large = device_array(group, np.ones(1 << 20, np.float32))
    with pytest.MonkeyPatch.context() as patch:
        if here.rank == 1:
            patch.setattr(staged._PinningByDriver, "pin", lambda *_: "no more")
        with pytest.raises(ArgumentError if here.rank else CollectiveError, match="rank 1: CUDA cannot pin 4194304"):
            group.all_reduce(large)
    group.all_reduce(large)
    assert (large.get() == here.size).all()
    # One rank has no room for an event of a copy. The others know it before the collective.
    for failing in range(2):
        with pytest.MonkeyPatch.context() as patch:
            if here.rank == 1:
                lack_room_for_events(patch, engine_of(group)._device.driver, failing)
            with pytest.raises(CudaError if here.rank else CollectiveError, match="cuEventCreate: out of memory"):
                group.all_reduce(large)
    group.all_reduce(large)
    assert (large.get() == here.size**2).all()
    # The steady state registers nothing.
    pinned = engine_of(group)._device.pinned
    known = pinned.registrations
    for _ in range(20):
        group.all_reduce(array)
    assert pinned.registrations - known <= 1
    host.barrier()


def lack_room_for_events(patch: pytest.MonkeyPatch, driver: CudaDriver, failing: int) -> None:
    """Have the engine's thread find no room for a new event, after `failing` events."""
    create, count = driver._functions["cuEventCreate"], itertools.count()
    patch.setattr(driver, "_idle_events", {False: deque(), True: deque()})

    def limited(*arguments: Any) -> int:
        is_engine = threading.current_thread().name == "multiring staged"
        return OUT_OF_MEMORY if is_engine and next(count) >= failing else int(create(*arguments))

    patch.setitem(driver._functions, "cuEventCreate", limited)


def test_failures_leave_the_group_usable() -> None:
    run_ranks(fail, 2)


def die(here: Here) -> bool:
    _, group = open_group(here, shares=True)
    array = device_array(group, np.ones(1000))
    group.all_reduce(array)
    if here.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    handle = group.all_reduce_async(array)
    with pytest.raises(PeerLostError, match="rank 1"):
        handle.wait()
    with pytest.raises(PeerLostError, match="rank 1"):
        group.all_reduce(array)
    return time.monotonic() - began_s < 60 and bool((array.get() == 2).all())


def test_a_rank_dies() -> None:
    report = report_of(die, 2)
    assert report.outcomes[0].value is True, report.outcomes[0]


# ---- orderings ----


def inputs_are_awaited(here: Here, group: Group) -> bool:
    hold = Hold(engine_of(group)._device.callers)
    handle = group.all_reduce_async(array := device_array(group, np.ones(100)))
    have_time(handle.done, PATIENCE_S)
    hold.release()
    handle.wait()
    return bool((array.get() == here.size).all())


def values_are_right(here: Here, group: Group) -> bool:
    """Reduce and send values that differ from call to call; results are looked at once."""
    is_right = True
    for turn in range(3):
        array = OtherArray(np.full(100, turn + 1.0), 0)
        group.all_reduce(array)
        is_right &= bool((array.now() == (turn + 1) * here.size).all())
        first = group.all_reduce_async(one := OtherArray(np.full(100, turn + 5.0), 0))
        second = group.broadcast_async(other := OtherArray(np.full(100, turn + 7.0 + here.rank), 0))
        first.wait()
        second.wait()
        is_right &= bool((one.now() == (turn + 5) * here.size).all() and (other.now() == turn + 7).all())
    return is_right


def memory_is_kept(here: Here, group: Group) -> bool:
    """Drop an operation and its array at once, and make new arrays while its copies are under way."""
    del here
    group.broadcast_async(device_array(group, np.zeros(100)))
    others = []
    for _ in range(round(stretched(LATE_US * 3 // 1000))):
        others.append(device_array(group, np.full(100, 5.0)))
        time.sleep(0.001)
    return all((each.get() == 5).all() for each in others)


Program = Callable[[Here, Group], bool]
MUTANTS: dict[str, tuple[Program, Any, str, list[str], Any]] = {
    "copy to the host before the inputs": (
        inputs_are_awaited,
        CudaDriver,
        "wait_on",
        ["_Staging._bring: self._driver.wait_on"],
        None,
    ),
    "host before the copy": (
        values_are_right,
        staged._Copied,
        "synchronize",
        ["_Staging._bring: _Copied.synchronize"],
        None,
    ),
    "end before the copy back": (
        values_are_right,
        staged._Copied,
        "synchronize",
        ["StagedOperation.await_device: _Copied.synchronize"],
        None,
    ),
    "block used again under a copy": (values_are_right, PinnedBlock, "note", ["_Staging._copy: block.note"], None),
    "copies that have happened at once": (
        values_are_right,
        CudaDriver,
        "has_happened",
        ["_Copied.query: self._driver.has_happened"],
        True,
    ),
    "memory let go under the copy back": (
        memory_is_kept,
        staged._Copied,
        "query",
        ["_Staging.let_go: copied.query"],
        True,
    ),
}


def caught(here: Here, seed: int) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether its program is right without it, and whether it is found."""
    host, found = here.join(), {}
    load(devices=1, seed=seed)
    copy, occupy = staged._Staging._copy, runtime().standin_occupy

    def late_copy(self: staged._Staging, *arguments: Any) -> Any:
        if here.rank == 1:  # the other rank's values come while copies of this one are under way
            occupy(self._device.copies, int(stretched(LATE_US)))
        return copy(self, *arguments)

    def is_right(program: Program) -> bool:
        group = host.on_device(0)
        own = program(here, group)
        assert runtime().cudaDeviceSynchronize() == 0  # no copy is under way
        return all(host.all_gather(np.array([own])))

    for name, (program, owner, method, places, instead) in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staged._Staging, "_copy", late_copy)
            right = is_right(program)
            changed = without(getattr(owner, method), *[f"{FILE} {each}" for each in places], instead=instead)
            patch.setattr(owner, method, changed)
            found[name] = right, any(not is_right(program) for _ in tries())
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    for found in run_ranks(caught, 2, seed):
        assert found == dict.fromkeys(MUTANTS, (True, True))


def captured_streams_are_refused(here: Here) -> None:
    _, group = open_group(here, shares=True)
    handle: Any = group.all_reduce_async(array := device_array(group, np.ones(4)))
    stream = new_stream()
    assert runtime().cudaStreamBeginCapture(stream, 0) == 0
    with pytest.raises(ArgumentError, match="is being captured"):
        handle.order(stream.value)
    while not handle.done():
        time.sleep(0.001)
    handle.wait()
    graph = ctypes.c_void_p()
    assert runtime().cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0  # the capture is intact
    assert (array.get() == here.size).all()


def test_a_captured_stream_is_refused() -> None:
    run_ranks(captured_streams_are_refused, 2)


def refuse(here: Here) -> None:
    """What a rank must not pass is an error on all ranks, and the group stays usable."""
    host, group = open_group(here, shares=True)
    group.all_reduce(array := device_array(group, np.ones(4)))
    other = OtherArray(np.ones(4), 0)  # a stream that is made later could get the handle of the destroyed one
    elsewhere = OtherArray(np.ones(4), 1)
    gone = new_stream()
    assert runtime().cudaStreamDestroy(gone) == 0
    handle: Any = group.all_reduce_async(array)
    with pytest.raises(CudaError, match=r"invalid resource handle \(400\)"):
        handle.order(gone.value)
    handle.wait()
    other.stream, stream = gone.value or 0, other.stream
    with pytest.raises(CudaError if here.rank == 1 else CollectiveError, match=r"invalid resource handle \(400\)"):
        group.all_reduce(other if here.rank == 1 else array)
    other.stream = stream
    with pytest.raises((ArgumentError, MismatchError), match=r"is on device 1; want an array on device 0"):
        group.all_reduce(elsewhere if here.rank == 1 else array)
    require_refusal_in_a_fork(group, array)
    group.all_reduce(array)
    assert (array.get() == here.size**3).all()
    host.barrier()


def test_what_is_refused_leaves_the_group_usable() -> None:
    run_ranks(refuse, 2)
