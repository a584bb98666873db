"""Copies between devices and pinned memory keep the order of streams; each ordering left out gives wrong values."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.lateness import tries
from tests.support.mutants import busy
from tests.support.ranks import Here

import multiring
import multiring.torch as mt
from multiring._runtime.engines import pinned_memory
from multiring._runtime.engines.pinned_memory import PinnedBlock, PinnedMemory
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch import device_staging
from multiring.torch.device_staging import DeviceStaging, staging_of

SEEDS = range(5)
ROUNDS = 12
COUNT = 1000
COUNTS = (COUNT, 6000)  # small tensors are copied to the host later
LATE = {"delay_us": 3000}


class Deaf(torch.cuda.Stream):
    """A stream that does not wait for events."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""


class Hasty(torch.cuda.Event):
    """An event for which nobody waits on the host."""

    def synchronize(self) -> None:
        """Do nothing."""


def deaf(stream: torch.cuda.Stream) -> Deaf:
    kind: Any = Deaf
    made: Deaf = kind(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    return made


def streams_of_other_devices(staging: DeviceStaging) -> None:
    names = ("Event", "set_stream", "is_current_stream_capturing", "current_device")
    proxy = SimpleNamespace(**{name: getattr(torch.cuda, name) for name in names})
    proxy.device, proxy.current_stream = lambda _: nullcontext(), lambda _: torch.cuda.current_stream()
    staging.module = proxy


def on_a_side_stream(patch: pytest.MonkeyPatch, *, before: bool, behind: bool) -> None:
    """Let copies to the device run beside the caller's stream, ordered in one direction only."""
    original = DeviceStaging.all_to_device

    def beside(self: DeviceStaging, sources: Any, targets: Any, after: Any = None) -> Any:
        if after is not None:
            return original(self, sources, targets, after)
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        if before:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            event = original(self, sources, targets)
        for target in targets:
            target.record_stream(side)
        if behind:
            current.wait_event(event)
        return event

    patch.setattr(DeviceStaging, "all_to_device", beside)


def without_record_stream(patch: pytest.MonkeyPatch, left_out: Callable[[torch.cuda.Stream], bool]) -> None:
    original = torch.Tensor.record_stream
    patch.setattr(torch.Tensor, "record_stream", lambda self, s: None if left_out(s) else original(self, s))


def hasty_reuse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedBlock, "is_quiet", lambda _: True)


def early_return(patch: pytest.MonkeyPatch) -> None:
    original = PinnedMemory.take

    def take(self: PinnedMemory, group: Any, size_bytes: int) -> Any:
        found = original(self, group, size_bytes)
        self._returned.append(pinned_memory._in_use[int(found.ctypes.data)])
        return found

    patch.setattr(PinnedMemory, "take", take)


def hasty_host(patch: pytest.MonkeyPatch) -> None:
    def recorded(_self: DeviceStaging, stream: Any) -> Any:
        kind: Any = Hasty
        event = kind(blocking=True)
        event.record(stream)
        return event

    patch.setattr(DeviceStaging, "_recorded", recorded)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch, DeviceStaging], None]] = {
    "to the host before the kernels": lambda patch, it: patch.setattr(it, "_to_host", deaf(it._to_host)),
    "to the device before the kernels": lambda patch, _: on_a_side_stream(patch, before=False, behind=True),
    "kernels before the copy to the device": lambda patch, _: on_a_side_stream(patch, before=True, behind=False),
    "to the device before its event": lambda patch, it: patch.setattr(it, "_to_device", deaf(it._to_device)),
    "source freed under the copy": lambda patch, it: without_record_stream(patch, it._to_host.__eq__),
    "target freed under the copy": lambda patch, it: without_record_stream(
        patch, lambda stream: stream not in (it._to_host, it._to_device)
    ),
    "target freed under the copy behind an event": lambda patch, it: without_record_stream(patch, it._to_device.__eq__),
    "host before the copy": lambda patch, _: hasty_host(patch),
    "block used again under a copy": lambda patch, _: hasty_reuse(patch),
    "block returned under its tensor": lambda patch, _: early_return(patch),
}


@contextmanager
def mutated(mutant: str, device: torch.device) -> Iterator[None]:
    staging = staging_of(device)
    module = staging.module
    with pytest.MonkeyPatch.context() as patch:
        if mutant:
            MUTANTS[mutant](patch, staging)
        yield
    staging.module = module


def wrong_rounds(rounds: int, device: torch.device) -> int:
    """Return how many rounds of a program that overlaps everything have a wrong result."""
    return sum(is_wrong(number, device) | is_wrong_behind_an_event(number, device) for number in range(rounds))


def is_found(device: torch.device) -> bool:
    """Return whether some round is wrong. After the first rounds, a stream of the device is busy, each time another."""
    staging = staging_of(device)
    streams = [torch.cuda.default_stream(device), staging._to_host, staging._to_device]
    for number in tries():
        if number > 0:
            with torch.cuda.stream(streams[number % 3]):
                busy()
        if wrong_rounds(ROUNDS if number == 0 else 2, device):
            return True
    return False


def overwritten(start: torch.Tensor) -> torch.Tensor:
    """Return a sum in place, which must come after a kernel that is still to write the tensor."""
    own = start.clone()
    handle = mt.allreduce_async_(own, op="sum")
    while not mt.poll(handle):
        time.sleep(0.001)
    own.fill_(-3.0)
    found: torch.Tensor = mt.synchronize(handle)
    return found


def is_wrong(number: int, device: torch.device) -> bool:
    count = COUNTS[number % 2]
    main, side, other = torch.cuda.default_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    values = torch.arange(count, dtype=torch.float32) + number
    start = values.to(device)
    started = main.record_event()
    torch.full((count,), -7.0, device=device)  # its memory is free at once, and is written later
    source = start * 2  # written later
    handles = [mt.allreduce_async(source, op="sum", prescale_factor=3.0)]
    del source
    junk = [torch.full((count,), -9.0, device=device) for _ in range(4)]
    more = start * 5
    handles.append(mt.allreduce_async(more, op="sum"))
    own = torch.empty(count, device=device).copy_(start)
    torch.full((count,), -5.0, device=device)
    first, second = map(mt.synchronize, handles)
    with torch.cuda.stream(other):  # does not wait for the copies that use the block
        other.wait_event(started)
        third = mt.allreduce(start, op="sum") + 1
    first, second = first + 1, second + 1
    again = [overwritten(start) for _ in range(3)]
    with torch.cuda.stream(side):
        side.wait_stream(main)
        mt.allreduce_(own, op="sum", prescale_factor=2.0)
    del own  # its memory is the default stream's, which does not wait for `side`
    fresh = [torch.full((count,), float(each), device=device) for each in range(6)]
    main.wait_stream(side)
    size = mt.size()
    torch.cuda.synchronize(device)
    found = [each.cpu() for each in (first, second, third, *again, *junk, *fresh)]
    wanted = [values * 6 * size + 1, values * 5 * size + 1, values * size + 1]
    wanted += [values * size] * 3
    wanted += [torch.full((count,), -9.0)] * 4 + [torch.full((count,), float(each)) for each in range(6)]
    return any(not torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def is_wrong_behind_an_event(number: int, device: torch.device) -> bool:
    main, side = torch.cuda.default_stream(device), torch.cuda.Stream(device)
    staging = staging_of(device)
    host = staging.pinned(multiring.world(), COUNT, torch.float32)
    host.array[:] = number
    target = torch.full((COUNT,), -1.0, device=device)
    with torch.cuda.stream(side):
        side.wait_stream(main)
        for _ in range(3):  # later than a copy that does not wait
            target.fill_(-2.0)
        after = side.record_event()
    staging.to_device(host.tensor, target, after).wait(main)
    found = target + 1
    lost = torch.full((COUNT,), -3.0, device=device)
    staging.to_device(host.tensor, lost, main.record_event())
    del lost
    fresh = torch.full((COUNT,), -4.0, device=device)
    torch.cuda.synchronize(device)
    return not (found.eq(number + 1).all() and target.eq(number).all() and fresh.eq(-4.0).all())


def rounds_of_mutants(here: Here) -> dict[str, bool]:  # noqa: ARG001
    mt.init()
    device = torch.device("cuda", torch.cuda.current_device())
    found = {}
    for mutant in ("", *MUTANTS):
        if mutant == "block returned under its tensor":
            device_staging._known.memory.clear()  # blocks that two users hold must not be used again
        with mutated(mutant, device):
            found[mutant] = is_found(device)
            torch.cuda.synchronize()
            gc.collect()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_left_out_is_found(seed: int) -> None:
    (found,) = run_cuda(rounds_of_mutants, hosts=1, devices=1, standin={"seed": seed, **LATE})
    assert not found.pop("")
    assert [mutant for mutant, is_wrong in found.items() if not is_wrong] == []


def on_another_device(here: Here) -> None:
    assert here.size == 1
    mt.init()
    torch.cuda.set_device(0)
    other = torch.device("cuda", 1)
    assert wrong_rounds(ROUNDS, other) == 0
    assert torch.cuda.current_device() == 0
    staging = staging_of(other)
    module = staging.module
    streams_of_other_devices(staging)
    try:
        assert is_found(other)
    except RuntimeError:  # torch reports streams of different devices
        torch.cuda.synchronize()
    staging.module = module


def test_a_tensor_may_be_on_another_device_than_the_current_one() -> None:
    run_cuda(on_another_device, hosts=1, devices=1, standin={"devices": 2, **LATE})


def steady_state(here: Here) -> None:  # noqa: ARG001
    mt.init()
    group, device = multiring.world(), torch.device("cuda", 0)
    pool = device_staging._known.memory_of(group)

    def rounds(count: int) -> None:
        for number in range(count):
            handles = [mt.allreduce_async(torch.ones(size, device=device)) for size in (1, 70, 3000, 100_000)]
            for handle in handles:
                mt.synchronize(handle)
            mt.allgather(torch.ones(number % 3 + 1, 50, device=device))
        torch.cuda.synchronize()

    rounds(30)
    for _ in range(10):  # a copy that comes later than any before it takes one more block
        known = pool.registrations
        rounds(100)
        if pool.registrations == known:
            break
    else:
        pytest.fail(f"{pool.registrations - known} registrations in 100 rounds after 930")
    gc.collect()
    assert not pinned_memory._in_use


def test_the_steady_state_registers_no_memory_and_every_block_comes_back() -> None:
    run_cuda(steady_state, hosts=1, devices=1)


def limits(here: Here) -> None:  # noqa: ARG001
    mt.init()
    group, device = multiring.world(), torch.device("cuda", 0)
    staging = staging_of(device)
    with pytest.raises(ArgumentError, match=r"float32 of shape \(3,\): want memory of DeviceStaging.pinned"):
        staging.to_host(torch.ones(3, device=device), torch.ones(3))
    empty = staging.pinned(group, 0, torch.float32)
    staging.to_host(torch.ones(0, device=device), empty.tensor).synchronize()
    held = [staging.pinned(group, 2 << 20, torch.float32) for _ in range(2)]  # 16 of 32 MiB
    with pytest.raises(
        ArgumentError, match=r"rank 0: no shared memory left .* no room for 12582912 bytes.*SEGMENT_BYTES"
    ):
        staging.pinned(group, 3 << 20, torch.float32)
    del held  # free blocks of other sizes make room
    assert staging.pinned(group, 3 << 20, torch.float32).tensor.is_pinned()
    assert mt.allreduce(torch.ones(3, device=device)).tolist() == [1.0] * 3


def test_what_the_arena_cannot_hold_is_refused_and_free_blocks_make_room() -> None:
    run_cuda(limits, hosts=1, devices=1, segment_bytes=32 << 20)


def captured(here: Here) -> None:  # noqa: ARG001
    mt.init()
    tensor = torch.ones(3, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for call in (mt.allreduce, mt.allgather, mt.reducescatter, lambda each: mt.broadcast_(each, 0)):
            with pytest.raises(UnsupportedError, match=r"cuda:0 is capturing a graph: .* call it before"):
                call(tensor)
    assert mt.allreduce(tensor).tolist() == [1.0] * 3


def test_a_captured_stream_is_refused() -> None:
    run_cuda(captured, hosts=1, devices=1)
