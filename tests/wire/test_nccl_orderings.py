"""The orderings of the nccl engine, on stand-ins of CUDA and NCCL: each is there, and each is needed.

For each ordering there is a program that is right with it, and a mutant of the engine without it.
"""

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.standin.build import built
from tests.standin.loading import load, nccl, runtime
from tests.support import lateness
from tests.support.cuda_ranks import (
    ExchangedArray,
    Hold,
    OtherArray,
    device_array,
    have_time,
    new_stream,
    pinned_array,
    reopen_engine,
)
from tests.support.lateness import stretched
from tests.support.orderings import without
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring._runtime.engines import cuda_arrays, nccl_device
from multiring._runtime.engines import nccl as nccl_engine
from multiring._runtime.engines.cuda_arrays import DeviceBlocks, Foreign
from multiring._runtime.engines.cuda_driver import CudaDriver
from multiring._runtime.engines.dlpack import imported
from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.nccl_communicator import NcclCommunicator
from multiring._runtime.engines.nccl_device import NcclDevice, NcclOperation
from multiring._runtime.engines.nccl_order import DeviceOrder, Time
from multiring._runtime.group.engine_calls import EngineHandle, _Lead
from multiring.errors import CollectiveError, MismatchError

SEEDS = range(5)
PATIENCE_S = 2.0  # for what may never come
LATE_US = 300_000

patience = SimpleNamespace(most_s=60.0)  # how long a program waits
ARRAYS = "_runtime/engines/cuda_arrays.py"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def inputs_are_awaited(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    hold = Hold(engine._device.callers)
    handle = group.all_reduce_async(array := device_array(group, np.ones(100)))
    have_time(handle.done)
    hold.release()
    handle.wait()
    return bool((array.get() == here.size).all())


def other_streams_are_awaited(here: Here, host: Group, seed: int) -> bool:
    _, group = reopen_engine(here, host, seed)
    array = OtherArray(np.ones(100), here.rank, is_held=True)
    handle = group.all_reduce_async(array)
    have_time(handle.done)
    assert array.hold is not None
    array.hold.release()
    handle.wait()
    return bool((array.now() == here.size).all())


def imported_arrays_are_awaited(here: Here, host: Group, seed: int) -> bool:
    _, group = reopen_engine(here, host, seed)
    array = ExchangedArray(np.ones(100), here.rank, is_held=True)
    handle = group.all_reduce_async(array)
    have_time(handle.done)
    assert array.hold is not None
    array.hold.release()
    handle.wait()
    return bool((array.now() == here.size).all())


def importers_wait_for_contents(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    other = OtherArray(np.ones(1), here.rank)
    hold = Hold(engine._device.callers)
    value = time.monotonic()  # not what the block held before
    own = device_array(group, np.full(100, value))
    given = imported(own, other.stream)
    found = other.copy_of(own)
    have_time(found.is_there)
    hold.release()
    return given.address == own.address and bool((found.get() == value).all())


def the_end_is_awaited(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    array = OtherArray(np.ones(100), here.rank)
    hold = Hold(engine._device.stream)
    handle = group.all_reduce_async(array)
    has_ended = have_time(handle.done)
    hold.release()
    handle.wait()
    return not has_ended and bool((array.now() == here.size).all())


def late_calls_of_nccl_are_awaited(here: Here, host: Group, seed: int) -> bool:
    _, group = reopen_engine(here, host, seed)
    right = True
    for turn in range(12):
        group.all_reduce(array := OtherArray(np.full(100, turn), here.rank))
        right &= bool((array.now() == turn * here.size).all())
    return right


def blocks_are_used_again_late(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    hold = None if here.rank == 0 else Hold(engine._device.callers)
    device_array(group, np.ones(100))  # gone while the stream has not come to its values yet
    found: Any = group.allocate(100, "float64")  # in the same memory
    if hold is None:
        found.put(np.full(100, 5.0))
    handle = group.broadcast_async(found)
    if hold is not None:
        have_time(handle.done)
        hold.release()
    handle.wait()
    return bool((found.get() == 5).all())


def memory_in_flight_is_kept(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    array = OtherArray(np.ones(100), here.rank)
    gone = weakref.ref(array)
    hold = Hold(engine._device.stream)
    handle = group.all_reduce_async(array)
    if here.rank == 0:
        del array, handle
        have_time(lambda: gone() is None)
        hold.release()
        host.barrier()
        return True
    hold.release()
    handle.wait()
    host.barrier()
    return bool((array.now() == here.size).all())


def one_order_for_all_groups(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    pair = [group, group.twin()]
    for each in pair:
        each.all_reduce(device_array(each, [1.0]))
    slow = [each.calls.engine._id for each in pair][here.rank]  # type: ignore[union-attr]
    order, agree = engine._device.order, engine._device.order.agree

    def agree_late(proposed: Time, number: int, operation: object) -> None:
        if proposed.group == slow:  # on each rank, the thread of another group is late
            time.sleep(stretched(0.04))
        agree(proposed, number, operation)

    order.agree = agree_late  # type: ignore[method-assign]
    handles = [each.all_reduce_async(device_array(each, [1.0])) for _ in range(5) for each in pair]
    for handle in handles:
        handle.wait(patience.most_s)  # in a wrong order, ranks may wait for each other without a report
    return True


def reopen_alone(here: Here, host: Group, seed: int) -> tuple[NcclEngine, Group]:
    """Reopen the engine; its group has the device for itself."""
    gc.collect()
    engine, group = reopen_engine(here, host, seed)
    assert have_time(lambda: engine._device.has_one_owner)  # the last program's engine may go late
    return engine, group


def lone_operations_have_the_order_of_the_calls(here: Here, host: Group, seed: int) -> bool:
    _, group = reopen_alone(here, host, seed)
    for _ in range(3):
        if here.rank == 0:
            time.sleep(stretched(0.02))
        gathered = group.all_gather_async(device_array(group, [1.0, 2.0]), waits=True)  # it waits for the agreement
        if here.rank == 0:
            time.sleep(stretched(0.02))
        handle = group.all_reduce_async(array := device_array(group, [3.0]))
        found = gathered.wait(patience.most_s).get()
        handle.wait(patience.most_s)
        if found.tolist() != [1, 2, 1, 2] or array.get() != 6:
            return False
    return True


def steps_of_an_operation_come_before_the_next_one(here: Here, host: Group, seed: int) -> bool:
    _, group = reopen_engine(here, host, seed)
    for _ in range(3):
        gathered = group.all_gather_async(device_array(group, np.full(here.rank + 1, 2.0)))
        handle = None
        if here.rank == 0:
            handle = group.all_reduce_async(array := device_array(group, [3.0]))
            time.sleep(stretched(0.05))
        found = gathered.wait(patience.most_s).get()
        if handle is None:
            handle = group.all_reduce_async(array := device_array(group, [3.0]))
        handle.wait(patience.most_s)
        if found.tolist() != [2, 2, 2] or array.get() != 6:
            return False
    return True


def leaders_come_before_other_groups(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_alone(here, host, seed)
    other = group.twin()
    other.all_reduce(device_array(other, [1.0]))
    if here.rank == 0:
        engine._device._owners -= 1  # as if the other group were made only after the next operation
        first = group.all_reduce_async(device_array(group, [1.0]))
        engine._device._owners += 1
        host.barrier()
        second = other.all_reduce_async(device_array(other, [1.0]))
    else:
        host.barrier()
        second = other.all_reduce_async(device_array(other, [1.0]))
        have_time(second.done)
        first = group.all_reduce_async(device_array(group, [1.0]))
    first.wait(patience.most_s)
    second.wait(patience.most_s)
    return True


def streams_wait_for_results(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    array = OtherArray(np.ones(100), here.rank)
    hold = Hold(engine._device.stream)
    handle: Any = group.all_reduce_async(array)
    handle.order(array.stream)
    found = array.later()
    have_time(found.is_there)
    hold.release()
    handle.wait()
    return bool((found.get() == here.size).all())


def memory_is_kept_for_streams(here: Here, host: Group, seed: int) -> bool:
    _, group = reopen_engine(here, host, seed)
    other = OtherArray(np.ones(1), here.rank)
    own = device_array(group, np.ones(1000))
    handle: Any = group.all_reduce_async(own)
    handle.order(other.stream)
    handle.wait()
    hold = Hold(other.stream)
    found = other.copy_of(own)
    gone = weakref.ref(own)
    del own, handle
    have_time(lambda: gone() is None)
    again = device_array(group, np.full(1000, 7.0))  # in the same memory
    have_time(found.is_there)
    hold.release()
    return bool((found.get() == here.size).all() and (again.get() == 7).all())


def copies_to_the_host_wait_for_results(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    other = OtherArray(np.ones(1), here.rank)
    own = device_array(group, np.ones(100))
    own.get()
    hold = Hold(engine._device.stream)
    handle: Any = group.all_reduce_async(own)
    handle.order(other.stream)
    threading.Timer(0.05, hold.release).start()
    return bool((own.get() == here.size).all())


def earlier_operations_end_before_an_abort(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_alone(here, host, seed)
    array = device_array(group, np.ones(100))
    hold = Hold(engine._device.stream)
    handle = group.all_reduce_async(array)
    refused = group.all_reduce_async(device_array(group, np.ones(5 + here.rank)))
    have_time(refused.done)
    hold.release()
    handle.wait(patience.most_s)
    with pytest.raises(MismatchError):
        refused.wait(patience.most_s)
    return bool((array.get() == here.size).all())


def captures_of_the_program_stay_valid(here: Here, host: Group, seed: int) -> bool:
    gc.collect()
    # The thread of the last program's device may end late, and this program needs a new one.
    assert have_time(lambda: all(each._has_ended for each in list(NcclDevice._shared.values())), 5.0)
    _, group = reopen_engine(here, host, seed)
    array, stream, graph = device_array(group, [1.0]), new_stream(), ctypes.c_void_p()
    assert runtime().cudaStreamBeginCapture(stream, 0) == 0
    group.all_reduce(array)
    is_valid = runtime().cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    return is_valid and bool(array.get() == here.size)


def memory_is_kept_after_a_failure(here: Here, host: Group, seed: int) -> bool:
    """Fail while NCCL writes a result, in the device's thread or in NCCL's call, and make new arrays at once."""
    first, second = (fails_quietly(here, host, seed, is_in_call=is_in_call) for is_in_call in (False, True))
    return first and second


def fails_quietly(here: Here, host: Group, seed: int, *, is_in_call: bool) -> bool:
    engine, group = reopen_engine(here, host, seed)
    assert nccl().standin_nccl_write_late(int(stretched(LATE_US))) == 0
    others = []
    with pytest.MonkeyPatch.context() as patch:
        if is_in_call:
            patch.setattr(NcclCommunicator, "settle", settle_and_fail)
        handle = group.all_reduce_async(device_array(group, np.full(1000, 1.0)))
        assert have_time(lambda: engine._put == 1, patience.most_s)
        host.barrier()
        time.sleep(stretched(LATE_US / 4e6))  # NCCL has the values, and writes them later, whether it is aborted or not
        if not is_in_call:
            engine._device.call(fail_in_the_thread)
        assert have_time(handle.done, patience.most_s)  # an error that `wait` has raised would keep the handle's memory
        assert "an error in" in str(engine.failure)
    del handle
    end_s = time.monotonic() + stretched(2 * LATE_US / 1e6)
    while time.monotonic() < end_s:
        others.append(device_array(group, np.full(1000, 5.0)))
        time.sleep(0.002)
    assert nccl().standin_nccl_write_late(0) == 0
    return all((each.get() == 5).all() for each in others)


def fail_in_the_thread() -> None:
    raise RuntimeError("an error in the device's thread")


def settle_and_fail(communicator: NcclCommunicator, check: Any, timeout_s: float) -> None:
    settle(communicator, check, timeout_s)
    time.sleep(stretched(LATE_US / 2e6))
    raise RuntimeError("an error in NCCL's call")


def values_may_change_after_a_copy(here: Here, host: Group, seed: int) -> bool:
    engine, group = reopen_engine(here, host, seed)
    memory = pinned_array(np.ones(100))
    own: Any = group.allocate(100, "float64")
    hold = Hold(engine._device.callers)
    own.put(memory)
    memory[:] = 9
    hold.release()
    return bool((own.get() == 1).all())


def next_as_agreed_here(order: DeviceOrder) -> Any:
    with order._changed:
        return order._agreed.pop(next(iter(order._agreed))) if order._agreed else None


def ready_of_none(buffer: Any) -> tuple[()]:
    del buffer
    return ()


def ready_of_own(buffer: Any) -> Any:
    return () if isinstance(buffer.owner, Foreign) else buffer.owner.ready


def settle_once(communicator: NcclCommunicator, check: Any, timeout_s: float) -> None:
    """Wait when the communicator is made, and never again."""
    if not hasattr(communicator, "is_made"):
        communicator.is_made = True  # type: ignore[attr-defined]
        settle(communicator, check, timeout_s)


class Forgetful(NcclOperation):
    """An operation that does not keep its memory."""

    @property
    def event(self) -> Any:
        return self._event

    @event.setter
    def event(self, event: Any) -> None:
        self._event = event
        if event is not None:
            self.put = self.buffers = None  # type: ignore[assignment]


def grows_always(lead: Any) -> bool:
    del lead
    return True


def begin_alone(handle: EngineHandle, engine: Any, lead: Any) -> bool:
    """Handle an operation, and do not wait for its next step."""
    if begin(handle, engine, lead):
        lead.leave(is_ahead=False)
    return False


def leave_at_once(_: NcclDevice, operation: NcclOperation) -> bool:
    operation.leave()
    return True


def have_nothing_wait(*_: Any) -> None:
    """Order no stream."""


settle = NcclCommunicator.settle
begin = EngineHandle.begin
give_back = DeviceBlocks.give_back
Program = Callable[[Here, Group, int], bool]
# An ordering's name: a program that needs it, and the patch that removes it.
MUTANTS: dict[str, tuple[Program, tuple[Any, str, Any]]] = {
    "wait for the engine's own inputs": (inputs_are_awaited, (nccl_device, "ready_of", ready_of_none)),
    "wait for other libraries' streams": (other_streams_are_awaited, (nccl_device, "ready_of", ready_of_own)),
    "have other libraries wait for their arrays": (
        imported_arrays_are_awaited,
        (cuda_arrays, "imported", lambda array, _: imported(array, -1)),
    ),
    "have an importing library wait for contents": (
        importers_wait_for_contents,
        (DeviceBlocks, "have_wait", have_nothing_wait),
    ),
    "ignore captures of other threads": (
        captures_of_the_program_stay_valid,
        (CudaDriver, "ignore_captures", have_nothing_wait),
    ),
    "wait for the end": (the_end_is_awaited, (NcclDevice, "_has_done", lambda *_: True)),
    "wait for NCCL's late calls": (late_calls_of_nccl_are_awaited, (NcclCommunicator, "settle", settle_once)),
    "wait before blocks are used again": (
        blocks_are_used_again_late,
        (DeviceBlocks, "give_back", lambda self, address, size, *_: give_back(self, address, size, ())),
    ),
    "keep memory in flight": (memory_in_flight_is_kept, (nccl_engine, "NcclOperation", Forgetful)),
    "one order for all groups": (one_order_for_all_groups, (DeviceOrder, "next", next_as_agreed_here)),
    "start a lone group's operations in order": (
        lone_operations_have_the_order_of_the_calls,
        (_Lead, "may_grow", grows_always),
    ),
    "wait for an operation's next step": (
        steps_of_an_operation_come_before_the_next_one,
        (EngineHandle, "begin", begin_alone),
    ),
    "agree on leaders before another group": (
        leaders_come_before_other_groups,
        (DeviceOrder, "wait_for_leaders", ready_of_none),
    ),
    "order a caller's stream": (streams_wait_for_results, (nccl_device, "have_wait", have_nothing_wait)),
    "wait for callers' streams before blocks are used again": (
        memory_is_kept_for_streams,
        (DeviceBlocks, "give_back", lambda self, address, size, ready, _: give_back(self, address, size, ready)),
    ),
    "wait before a copy from the host": (
        memory_is_kept_for_streams,
        (CudaDriver, "wait_on", without(CudaDriver.wait_on, f"{ARRAYS} CudaArray.put: driver.wait_on")),
    ),
    "wait before a copy to the host": (
        copies_to_the_host_wait_for_results,
        (CudaDriver, "wait_on", without(CudaDriver.wait_on, f"{ARRAYS} CudaArray.get: driver.wait_on")),
    ),
    "keep memory after a failure": (memory_is_kept_after_a_failure, (NcclDevice, "_has_left", leave_at_once)),
    "copy pinned values of the program first": (
        values_may_change_after_a_copy,
        (CudaDriver, "device_of", have_nothing_wait),
    ),
    "end earlier operations before an abort": (
        earlier_operations_end_before_an_abort,
        (nccl_engine, "_wait_quietly", ready_of_none),
    ),
}


def run_mutant(here: Here, name: str, seed: int, number: int) -> tuple[bool, bool]:
    """Return whether the program is right with the ordering and, in try `number`, without it."""
    host = here.join()
    load(devices=2, delay_us=1000)
    program, (place, attribute, mutant) = MUTANTS[name]
    right = program(here, host, seed)
    host.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, attribute, mutant)
        lateness.begin(number)
        patience.most_s = stretched(PATIENCE_S)
        try:
            return right, program(here, host, seed)
        except (CollectiveError, TimeoutError):
            return right, False


@pytest.mark.parametrize("name", MUTANTS)
def test_each_ordering_is_needed_and_there(name: str) -> None:
    """Each seed has ranks of its own: what a failed program leaves must not fail the next one, which is right."""
    for seed in SEEDS:
        for number in lateness.tries():
            by_rank = run_ranks(run_mutant, 2, name, seed, number)
            assert all(right for right, _ in by_rank), seed
            if not all(mutated for _, mutated in by_rank):
                break
        else:
            pytest.fail(f"seed {seed}: not found")
