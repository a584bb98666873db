"""The nccl engine on stand-ins of CUDA and NCCL: values, orderings, failures."""

import ctypes
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.standin.build import built
from tests.standin.loading import load, nccl, reports, runtime
from tests.support.cuda_ranks import (
    Hold,
    OtherArray,
    device_array,
    have_time,
    new_stream,
    open_engine,
    reopen_engine,
    values_of,
)
from tests.support.faults import freeze as stop
from tests.support.faults import kill
from tests.support.ranks import Here, report_of, run_ranks

from multiring import Group
from multiring._runtime.engines.cuda_driver import CudaError
from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.nccl_device import OpenOperations
from multiring._runtime.engines.nccl_library import find_nccl
from multiring._runtime.engines.nccl_order import DeviceOrder, Time
from multiring.errors import (
    ArgumentError,
    CollectiveError,
    MismatchError,
    PeerLostError,
    StallError,
    StateError,
    UnsupportedError,
)

PATIENCE_S = 10.0
SOON_S = 20.0  # with a loaded machine; a device of these tests that comes to nothing is occupied for 30 s
REDUCED = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
MOVED = (*REDUCED, "int16", "uint16")
OPS: dict[str, Callable[..., Any]] = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def combined(operands: list[Any], op: str) -> Any:
    total = operands[0]
    for each in operands[1:]:
        total = OPS[op](total, each)
    return total


def check_values(group: Group, array: Callable[[Group, Any], Any]) -> None:
    """Compare every collective of every type with NumPy's result."""
    size, rank = group.size, group.rank
    for dtype in REDUCED:
        operands = [values_of(each, (5, 3), dtype) for each in range(size)]
        for op in OPS:
            group.all_reduce(found := array(group, operands[rank]), op)
            assert (found.get() == combined(operands, op)).all(), (dtype, op)
        part = group.reduce_scatter(array(group, operands[rank]), op="max")
        rows = [5 // size + (each < 5 % size) for each in range(size)]
        start = sum(rows[:rank])
        assert (part.get() == combined(operands, "max")[start : start + rows[rank]]).all(), dtype
    for dtype in ("float16", "float32", "float64"):
        operands = [values_of(each, (7,), dtype) for each in range(size)]
        group.all_reduce(found := array(group, operands[rank]), "average")
        assert np.allclose(found.get(), np.mean(operands, axis=0), rtol=1e-3)
    for dtype in MOVED:
        own = values_of(rank, (rank + 1, 2), dtype)
        every = [values_of(each, (each + 1, 2), dtype) for each in range(size)]
        assert (group.all_gather(array(group, own)).get() == np.concatenate(every)).all()
        group.broadcast(found := array(group, values_of(rank, (4,), dtype)), root=size - 1)
        assert (found.get() == values_of(size - 1, (4,), dtype)).all()
        sent = values_of(rank, (size, 3), dtype)
        received = group.all_to_all(array(group, sent)).get()
        assert (received == [values_of(each, (size, 3), dtype)[rank] for each in range(size)]).all()
    even = group.all_gather(array(group, values_of(rank, (2,), "float32")))
    assert (even.get() == np.concatenate([values_of(each, (2,), "float32") for each in range(size)])).all()
    group.all_reduce(array(group, np.zeros((0, 3), np.float32)))


def compute(here: Here) -> set[str]:
    host, _, group = open_engine(here, delay_us=300)
    check_values(group, device_array)
    # Operations of overlapping groups, started in different orders; most handles and arrays are dropped.
    twin, pair = group.twin(), group.subgroup([group.size - 1, 0]) if group.size > 1 else None
    kept, last = [], None
    for turn in range(6):
        for each in (group, twin) if (turn + here.rank) % 2 else (twin, group):
            kept.append((each.all_reduce_async(found := device_array(each, [turn + 1.0])), found))
            each.broadcast_async(device_array(each, [1.0]))
        if pair is not None:
            last = pair.all_reduce_async(device_array(pair, [1]))
    for index, (handle, found) in enumerate(kept):
        handle.wait()
        assert found.get() == (index // 2 + 1) * here.size
    if last is not None:
        last.wait()
    # Arrays of other libraries
    other = OtherArray(np.full(5, here.rank + 1.0), here.rank % 4)
    if here.engine == "shm":
        group.all_reduce(other)
        assert (other.now() == sum(range(1, here.size + 1))).all()
    assert reports() == []
    host.all_reduce(np.ones(3))
    return {plan.engine for plan in group.plans.values()}


@pytest.mark.parametrize(
    ("engine", "ranks"), [("shm", 1), ("shm", 2), ("tcp", 2), ("shm", 4), ("shm+tcp", 4), ("tcp", 4)]
)
def test_collectives_on_devices(engine: str, ranks: int) -> None:
    assert run_ranks(compute, ranks, engine=engine) == [{"nccl"}] * ranks


# -- failures


def fail(here: Here) -> None:
    host, engine, group = open_engine(here, memory_mb=8)
    array = device_array(group, np.ones(4, np.float32))
    with pytest.raises(MismatchError, match="float32 of shape"):
        group.all_reduce(array if here.rank else device_array(group, np.ones(5, np.float32)))
    with pytest.raises(ArgumentError if here.rank == 0 else MismatchError, match="is not in device memory"):
        group.all_reduce(np.ones(4, np.float32) if here.rank == 0 else array)
    wrong = 1 - here.rank  # the other rank's device
    with pytest.raises(ArgumentError, match=f"is on device {wrong}; want an array on device {here.rank}"):
        group.all_reduce(OtherArray(np.ones(4), wrong))
    with pytest.raises(UnsupportedError, match="NCCL does not reduce int16"):
        group.all_reduce(device_array(group, np.ones(4, np.int16)))
    with pytest.raises(UnsupportedError, match="average of int32 may wrap"):
        group.all_reduce(device_array(group, np.ones(4, np.int32)), "average")
    # Memory of arrays that are gone is used again, also for arrays of another size.
    for _ in range(3):
        device_array(group, np.ones(5 << 20, np.uint8))
    kept = device_array(group, np.ones(5 << 20, np.uint8))
    with pytest.raises(ArgumentError, match=rf"rank {here.rank}: no room for 7340032 bytes on device {here.rank}"):
        group.allocate(7 << 20, np.uint8)
    del kept
    group.all_reduce(array)
    assert (array.get() == here.size).all()

    # NCCL reports an error late, on one rank.
    if here.rank == 1:
        assert nccl().standin_nccl_fail(engine._communicator._handle, 2, 0) == 0  # type: ignore[union-attr]
    began = time.monotonic()
    handle = group.all_reduce_async(array)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="rank 1: NCCL: unhandled system error"):
            handle.wait()
    with pytest.raises(CollectiveError, match="rank 1: NCCL: unhandled system error"):
        group.all_reduce(array)
    assert time.monotonic() - began < SOON_S

    # The job, the device and other engines are usable.
    host.barrier()
    _, group = reopen_engine(here, host, 1)
    group.all_reduce(array := device_array(group, [1.0]))
    assert array.get() == here.size


def test_failures_on_devices() -> None:
    run_ranks(fail, 2)


def is_refused_in_a_fork(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StateError as error:
        return "this process was forked" in str(error)
    return False


def require_refusal_in_a_fork(group: Group, array: Any) -> None:
    child = os.fork()
    if child == 0:
        os._exit(sum(not is_refused_in_a_fork(call) for call in (lambda: group.all_reduce(array), array.get)))
    assert os.waitpid(child, 0)[1] == 0


def refuse(here: Here) -> None:
    """What a rank must not pass is refused, and the group stays usable."""
    host, _, group = open_engine(here)
    array = device_array(group, np.ones(4, np.float32))
    with pytest.raises(UnsupportedError, match="NCCL has no wire types; use wire=None"):
        group.all_reduce(array, wire="bf16")
    # A destroyed stream, where CUDA reports it
    other = OtherArray(np.ones(4), here.rank)  # a stream that is made later could get the handle of the destroyed one
    gone = new_stream()
    assert runtime().cudaStreamDestroy(gone) == 0
    handle: Any = group.all_reduce_async(array)
    with pytest.raises(CudaError, match=r"cuStreamIsCapturing: invalid resource handle \(400\)"):
        handle.order(gone.value)
    handle.wait()
    other.stream, stream = gone.value or 0, other.stream
    with pytest.raises(CudaError if here.rank == 1 else MismatchError, match=r"invalid resource handle \(400\)"):
        group.all_reduce(other if here.rank == 1 else array)
    other.stream = stream
    # A stream that is being captured; the capture stays as it is.
    captured, graph = new_stream(), ctypes.c_void_p()
    assert runtime().cudaStreamBeginCapture(captured, 0) == 0
    with pytest.raises(ArgumentError, match="is being captured, and a graph cannot hold operations of multiring"):
        handle.order(captured.value)
    other.stream = captured.value or 0
    with pytest.raises(ArgumentError, match="is being captured"):
        group.all_reduce(other)
    other.stream = stream
    assert runtime().cudaStreamEndCapture(captured, ctypes.byref(graph)) == 0
    # One rank has no room for the result.
    rows = device_array(group, np.ones(4, np.float32))
    for name in ("all_gather", "reduce_scatter"):
        if here.rank == 0:
            runtime().standin_fail_allocations(0, 8)
        with pytest.raises(
            ArgumentError if here.rank == 0 else MismatchError, match=r"no room for .* bytes on device 0"
        ):
            getattr(group, name)(rows)
        if here.rank == 0:
            runtime().standin_fail_allocations(-1, 0)
    require_refusal_in_a_fork(group, array)
    group.all_reduce(array)
    assert (array.get() == here.size**2).all()
    host.barrier()


def test_what_is_refused_leaves_the_group_usable() -> None:
    run_ranks(refuse, 2)


def use_two_engines(here: Here) -> None:
    """Two engines of a process on one device have one order, though each was opened by itself."""
    host, engine, group = open_engine(here)
    twin = host.twin()
    second = NcclEngine.open(twin, here.rank)
    assert second._device is engine._device
    groups = [group, twin.on_engine(second)]
    handles = []
    for turn in range(6):
        for each in groups if (turn + here.rank) % 2 else groups[::-1]:
            array = device_array(each, [turn])
            handles.append((each.all_reduce_async(array), array, turn))
    for handle, array, turn in handles:
        handle.wait()
        assert array.get() == 2 * turn
    assert reports() == []
    host.barrier()


def test_engines_of_one_device_share_its_order() -> None:
    run_ranks(use_two_engines, 2)


def leave_first(here: Here) -> None:
    """A rank that leaves after its part of the last operation does not fail it on the others."""
    _, engine, group = open_engine(here)
    array = device_array(group, np.ones(4))
    group.all_reduce(array)
    handle = group.all_reduce_async(array)
    if here.rank == 0:
        hold = Hold(engine._device.stream)  # behind the operation
        group_event = engine._device.driver.record(engine._device.stream)
        have_time(lambda: engine._device.driver.has_happened(group_event))
        hold.release()
    handle.wait()
    assert (array.get() == 4).all()


def test_a_rank_may_leave_after_its_last_operation() -> None:
    run_ranks(leave_first, 2)


def reduce_until_it_fails(group: Group, array: Any) -> None:
    while True:
        group.all_reduce(array)


def stick(here: Here) -> str:
    host, engine, group = open_engine(here)
    array = device_array(group, np.ones(4))
    group.all_reduce(array)
    host.barrier()
    if here.rank == 1:
        runtime().standin_fail_on_stream(engine._device.callers, 710)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="device-side assert triggered") as caught:
        reduce_until_it_fails(group, array)
    assert time.monotonic() - began < SOON_S
    return str(caught.value)


def test_an_error_that_stays_is_reported_by_all() -> None:
    for text in run_ranks(stick, 2):
        assert text.startswith("rank 1: device 1: cu")
        assert "(710); this process cannot use its devices any more and must end" in text


def lose(here: Here) -> None:
    _, engine, group = open_engine(here, delay_us=2000)
    array = device_array(group, np.ones(4))
    group.all_reduce(array)
    if here.rank == 2:
        runtime().standin_occupy(engine._device.stream, 1_000_000)
    handle = group.all_reduce_async(array)
    here.reach("posted")
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 2"):
        handle.wait()
    with pytest.raises(CollectiveError, match="rank 2"):
        group.all_reduce(array)
    assert time.monotonic() - began < SOON_S


def test_a_rank_is_killed_in_an_operation() -> None:
    outcomes = report_of(lose, 3, faults=[kill(2).at("posted").after(0.1)]).outcomes
    assert [each.exit_code for each in outcomes] == [0, 0, -signal.SIGKILL], outcomes


def freeze(here: Here) -> None:
    host, engine, group = open_engine(here)
    array = device_array(group, np.ones(4))
    group.all_reduce(array)
    if here.rank == 1:  # its device comes to nothing any more
        runtime().standin_occupy(engine._device.stream, 30_000_000)
    began = time.monotonic()
    with pytest.raises(StallError, match="has not ended for"):
        group.all_reduce(array)
    assert time.monotonic() - began < SOON_S
    host.barrier()


def test_an_operation_that_does_not_end_is_an_error_on_all_ranks() -> None:
    run_ranks(freeze, 2, stall_timeout_s=3.0)


def fall_silent(here: Here) -> None:
    _, engine, group = open_engine(here)
    array = device_array(group, np.ones(4))
    group.all_reduce(array)
    hold = Hold(engine._device.stream)
    if here.rank == 0:
        hold.release()
    handle = group.all_reduce_async(array)
    have_time(lambda: engine._put == 2)
    here.reach("posted")
    began = time.monotonic()
    with pytest.raises(StallError, match="rank 1 does not answer"):
        handle.wait()
    assert time.monotonic() - began < SOON_S


def test_a_silent_rank_is_named() -> None:
    outcomes = report_of(fall_silent, 2, faults=[stop(1).at("posted")], stall_timeout_s=3.0).outcomes
    assert outcomes[0].error is None, outcomes


def lose_two(here: Here) -> None:
    """Lose a rank with operations of two groups on the device, if an abort waits for the device's other operations."""
    _, engine, group = open_engine(here)
    assert nccl().standin_nccl_abort_waits() == 0
    groups = [group, group.twin()]
    for each in groups:
        each.all_reduce(device_array(each, [1.0]))
    if here.rank == 1:
        runtime().standin_occupy(engine._device.stream, 1_000_000)
    handles = [each.all_reduce_async(device_array(each, [1.0])) for each in groups]
    assert have_time(lambda: len(engine._device.in_flight) == len(groups), PATIENCE_S)
    here.reach("posted")
    began_s = time.monotonic()
    for handle in handles:
        with pytest.raises(PeerLostError, match="rank 1"):
            handle.wait()
    assert time.monotonic() - began_s < SOON_S


def test_an_abort_that_waits_for_another_group_ends() -> None:
    outcomes = report_of(lose_two, 2, faults=[kill(1).at("posted").after(0.1)]).outcomes
    assert [each.exit_code for each in outcomes] == [0, -signal.SIGKILL], outcomes


def share(here: Here) -> str:
    host = here.join()
    load(devices=1)
    with pytest.raises(CollectiveError) as caught:
        NcclEngine.open(host, 0)
    return str(caught.value)


def test_two_ranks_on_one_device_are_refused() -> None:
    first, second = run_ranks(share, 2)
    assert first == second
    assert re.search("Duplicate GPU detected : rank (0 and rank 1|1 and rank 0) both on CUDA device", first), first


def lack_a_driver(here: Here) -> str:
    host = here.join()
    load(driver=10020 if here.rank == 1 else 13000)
    with pytest.raises(UnsupportedError if here.rank == 1 else CollectiveError) as caught:
        host.on_device(f"cuda:{here.rank}")
    return str(caught.value)


def test_an_old_driver_is_refused_with_both_versions() -> None:
    text = "the CUDA driver on this host serves CUDA 10.2; want 11.0 or later: install a newer NVIDIA driver"
    assert run_ranks(lack_a_driver, 2) == [f"rank 1: {text}", text]


def lack(here: Here) -> tuple[str, str]:
    host = here.join()
    found = []
    if here.rank == 0:
        load(nccl=21700)
    for _ in range(2):
        try:
            NcclEngine.open(host, 0)
        except Exception as error:  # noqa: BLE001 -- what the test is about
            found.append(f"{type(error).__name__}: {error}")
        os.environ["STANDIN_NCCL"] = "22809"
    return found[0], found[1]


def test_a_rank_without_the_libraries_is_named_on_all_ranks() -> None:
    first, second = run_ranks(lack, 2)
    assert first[0].startswith("UnsupportedError: no NCCL 2.18.0 or later: ")
    assert "is NCCL 2.17.0; want 2.18.0 or later" in first[0]
    assert second[1].startswith("UnsupportedError: no CUDA driver: libcuda.so.1: ")
    assert first[1] == f"CollectiveError: rank 1: {second[1].partition(': ')[2]}"


# -- parts


def test_operations_have_one_order() -> None:
    order = DeviceOrder()
    first, second = order.propose(7), order.propose(5)
    assert (first, second) == (Time(1, 7), Time(2, 5))
    order.agree(second, 4, "second")
    assert order.next() is None  # the first may still come earlier
    order.agree(first, 9, "first")
    assert order.propose(5) == Time(10, 5)
    assert [order.next(), order.next(), order.next()] == ["second", "first", None]
    order.withdraw(Time(10, 5))
    third = order.propose(6)
    order.agree(third, third.number, "third")
    assert order.next() == "third"


def test_an_operation_leads_only_if_its_group_is_alone() -> None:
    order = DeviceOrder()
    assert not order.lead("shared", lambda: False)
    assert order.next() is None
    assert order.lead("alone", lambda: True)
    assert order.next() == "alone"
    order.see(order.proposal())
    order.wait_for_leaders()
    assert order.propose(3) == Time(2, 3)
    assert not order.lead("behind", lambda: True)


class Made:
    """An operation, as far as the list of open ones knows it."""

    def __init__(self, *, has_ended: bool = False) -> None:
        self.has_ended = has_ended
        self.ring = self  # so that the garbage collector drops it, in any thread

    def done(self) -> bool:
        return self.has_ended


def test_open_operations_are_read_while_others_come_and_go() -> None:
    """Several threads start operations, drop them and wait for all of them."""
    operations: Any = OpenOperations()
    kept, ended = Made(), Made(has_ended=True)
    operations.add(kept)
    operations.add(ended)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            adding = [threads.submit(lambda: [operations.add(Made()) for _ in range(4000)]) for _ in range(2)]
            counts = []
            while not all(each.done() for each in adding):
                now = operations.now()
                assert kept in now
                assert ended not in now
                counts.append(len(now))
                del now
            assert [each.exception() for each in adding] == [None, None]
    finally:
        sys.setswitchinterval(before)
    gc.collect()
    assert operations.now() == [kept]
    assert max(counts) > 1


def search(here: Here) -> list[str]:
    assert here.size == 1
    found = []
    try:
        find_nccl()
    except UnsupportedError as error:
        found.append(str(error))
    load()
    found.append(find_nccl().path)
    return found


def test_nccl_is_found_where_it_is() -> None:
    ((missing, loaded),) = run_ranks(search, 1)
    assert missing.startswith("no NCCL 2.18.0 or later: libnccl.so.2: cannot open shared object file")
    assert loaded == str(built() / "libnccl.so.2")
