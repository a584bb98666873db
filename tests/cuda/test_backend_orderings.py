"""Each ordering of the backend "multiring" on devices is needed: results are wrong, or an error is raised, without it.

`make test-cuda` takes one seed of the stand-ins' delays; benchmarks/evidence/torch/on_devices.py takes five.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.cuda.test_device_staging import early_return, hasty_reuse
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.lateness import stretched, tries
from tests.support.mutants import SEEDS, Patch, busy
from tests.support.orderings import without
from tests.support.ranks import Here
from torch import Tensor

import multiring_torch
from multiring._runtime.engines import pinned_memory
from multiring.torch import device_staging
from multiring.torch.c10d import buffers, staged
from multiring.torch.c10d.staged import StagedTensors, StagedWork
from multiring.torch.device_staging import DeviceStaging

dist: Any = torch.distributed  # typed Any, because torch's stubs are incomplete
multiring_torch.register()  # torch loads the entry points of installed packages only

LATE = {"delay_us": 3000}
ROUNDS, COUNT = 4, 1000
FILE = "torch/c10d/staged.py"


def total(values: Tensor, size: int) -> Tensor:
    return values * sum(range(1, size + 1))


# ---- programs: each returns whether its results are right ----


def reduces(here: Here, device: torch.device, number: int) -> bool:
    values = torch.arange(COUNT, dtype=torch.float32) + number
    source = torch.full((COUNT,), -7.0, device=device)
    source = values.to(device) * (here.rank + 1)  # written late
    work = dist.all_reduce(source, async_op=True)
    work.wait()
    return torch.equal((source + 1).cpu(), total(values, here.size) + 1)


def receives(here: Here, device: torch.device, number: int) -> bool:
    """Receive into a tensor that its stream is still to write."""
    values, other = torch.arange(COUNT, dtype=torch.float32) + number, (here.rank + 1) % here.size
    sent, got = (values + here.rank).to(device), torch.empty(COUNT, device=device)
    earlier = torch.full((COUNT,), -3.0).pin_memory()
    torch.cuda.synchronize()
    sending = dist.isend(sent, other)
    time.sleep(stretched(0.005))  # the message is there
    busy()
    got.copy_(earlier, non_blocking=True)
    dist.irecv(got, other).wait()
    sending.wait()
    torch.cuda.synchronize()
    return torch.equal(got.cpu(), values + other)


def drops(here: Here, device: torch.device, number: int) -> bool:
    """Drop tensors with gaps whose results are on their way, and use their memory again."""
    assert here.size > 1
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    used: list[int] = []
    with Patch.context() as patch:
        contents = buffers.contents

        def noted(tensor: Tensor) -> Tensor:
            found = contents(tensor)
            used.extend([tensor.data_ptr(), found.data_ptr()])
            return found

        patch.setattr(staged, "contents", noted)
        gaps = torch.full((COUNT, 2), float(number), device=device)[:, 0]
        work = dist.all_reduce(gaps, async_op=True)
        while not work._has_ended.is_set():
            time.sleep(0.0001)
        event = work._event
        del gaps, work
        time.sleep(stretched(0.0003))  # the thread lets go of the operation
        # A kernel of the stand-ins reads when it is called. Only addresses show that what it reads is reused early.
        again = [torch.empty(COUNT, each, device=device) for each in (1, 1, 1, 2, 2)]
        is_reused = any(each.data_ptr() in used for each in again) and not event.query()
        fresh = [torch.full((COUNT, 2), 100.0 + each, device=device) for each in range(3)]
    torch.cuda.synchronize()
    return not is_reused and all(bool((each == 100.0 + place).all()) for place, each in enumerate(fresh))


def calls_back(here: Here, device: torch.device, number: int) -> bool:
    values = torch.arange(COUNT, dtype=torch.float32) + number
    future = dist.all_reduce(values.to(device) * (here.rank + 1), async_op=True).get_future()
    found = future.then(lambda done: done.value()[0] * 2).wait()
    return torch.equal((found + 1).cpu(), total(values, here.size) * 2 + 1)


def mixes(here: Here, device: torch.device, number: int) -> bool:
    """Reduce on the device and then on the host; the copy of rank 0's device is late."""
    own, host = torch.full((COUNT,), float(number), device=device), torch.full((COUNT,), 3.0)
    work = dist.all_reduce(own, async_op=True)
    time.sleep(stretched(0.02 * here.rank))
    dist.all_reduce(host)
    work.wait()
    wanted = torch.full((COUNT,), float(number * here.size))
    return torch.equal(own.cpu(), wanted) and bool((host == 3 * here.size).all())


def overlaps(here: Here, device: torch.device, number: int) -> bool:
    """Run operations on streams that do not wait for each other; their blocks must be apart."""
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    sources = [torch.full((COUNT,), 10.0 * number + each, device=device) for each in range(len(streams))]
    torch.cuda.synchronize()
    time.sleep(stretched(0.03 * here.rank))  # rank 0's first operations are on the host when it starts the next ones
    works = []
    for place, (stream, source) in enumerate(zip(streams, sources, strict=True)):
        with torch.cuda.stream(stream):
            works.append(dist.all_reduce(source, async_op=True))
        if place == 2:
            while not all(work._has_ended.is_set() for work in works):
                time.sleep(0.0005)
            while works:
                works.pop(0)  # the block of the last one is used again first
            for _ in range(round(stretched(20))):  # until their blocks are free; their copies back have not ended
                time.sleep(0.0002 if pinned_memory._in_use else 0)
        elif here.rank == 0:
            time.sleep(stretched(0.006))
    works[-1].wait()
    torch.cuda.synchronize()
    found = [each.cpu() for each in sources]
    return all(bool((each == here.size * (10 * number + place)).all()) for place, each in enumerate(found))


# ---- mutants ----


def leave_out(owner: Any, method: str, call: str, patch: Patch) -> None:
    patch.setattr(owner, method, without(getattr(owner, method), f"{FILE} {call}"))


def hasty_copy_back(patch: Patch) -> None:
    patch.setattr(StagedWork, "wait_on_host", lambda _: None)


def hasty_callbacks(patch: Patch) -> None:
    """Neither the stream of a future nor `wait` in its callback comes behind the outputs."""
    patch.setattr(staged, "Future", lambda devices: torch.futures.Future())  # noqa: ARG005
    original = StagedWork._outcome

    def outcome(self: StagedWork, ended: Any) -> list[Tensor]:
        with Patch.context() as inner:
            inner.setattr(StagedWork, "wait", lambda _: True)
            return original(self, ended)

    patch.setattr(StagedWork, "_outcome", outcome)


def hasty_host_operations(patch: Patch) -> None:
    patch.setattr(StagedTensors, "wait_until_issued", lambda _: None)


Program = Callable[[Here, torch.device, int], bool]
STREAM, EVENT = torch.cuda.Stream, torch.cuda.Event
MUTANTS: dict[str, tuple[Program, Callable[[Patch], None]]] = {
    "kernels before the outputs": (
        reduces,
        partial(leave_out, STREAM, "wait_event", "StagedWork.wait: current_stream.wait_event"),
    ),
    "host before the copies": (
        reduces,
        partial(leave_out, EVENT, "synchronize", "_issue: event.synchronize"),
    ),
    "copies back before the host": (reduces, hasty_copy_back),
    "outputs before the copies back": (
        reduces,
        partial(leave_out, STREAM, "wait_event", "_brought_back: stream.wait_event"),
    ),
    "end before the outputs": (
        reduces,
        partial(leave_out, EVENT, "record", "_brought_back: event.record"),
    ),
    "outputs before earlier kernels": (
        receives,
        partial(leave_out, EVENT, "record", "StagedTensors._prepared: ready.record"),
    ),
    "output with gaps freed under its copy": (
        drops,
        partial(leave_out, staged, "record_use", "_brought_back: record_use(tensor)"),
    ),
    "copy without gaps freed too early": (
        drops,
        partial(leave_out, staged, "record_use", "_brought_back: record_use(dense)"),
    ),
    "callbacks before the outputs": (calls_back, hasty_callbacks),
    "block used again under a copy": (overlaps, hasty_reuse),
    "block returned under its tensor": (overlaps, early_return),
    "host operations before those of devices": (
        mixes,
        hasty_host_operations,
    ),  # the last: the group cannot be used then
}


# Where copies come late.
LATE_TO_HOST: dict[Program, tuple[int, ...]] = {reduces: (0, 1), mixes: (0,)}  # on these ranks
LATE_TO_DEVICE: set[Program] = {reduces, drops, calls_back, overlaps}


def slow_down(patch: Patch, program: Program, rank: int) -> None:
    """Have copies to and from the device come late."""
    to_device, to_host = DeviceStaging.all_to_device, DeviceStaging.all_to_host

    def late_to_device(self: DeviceStaging, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.stream(self._to_device):
            busy()
        return to_device(self, *arguments, **options)

    def late_to_host(self: DeviceStaging, *arguments: Any) -> Any:
        with torch.cuda.stream(self._to_host):
            busy()
        return to_host(self, *arguments)

    if program in LATE_TO_DEVICE:
        patch.setattr(DeviceStaging, "all_to_device", late_to_device)
    if rank in LATE_TO_HOST.get(program, ()):
        patch.setattr(DeviceStaging, "all_to_host", late_to_host)


def is_right(program: Program, here: Here, device: torch.device) -> bool:
    with Patch.context() as patch:
        slow_down(patch, program, here.rank)
        found = [program(here, device, number) for number in range(ROUNDS)]
        torch.cuda.synchronize()
    return all(found)


def agreed(here: Here, store: Any, number: int, *, own: bool) -> bool:
    """Return whether all ranks say yes, through torch's store, because a mutant may harm the group."""
    store.set(f"{number} {here.rank}", "yes" if own else "no")
    return all(store.get(f"{number} {rank}") == b"yes" for rank in range(here.size))


def missed(here: Here, place: str) -> tuple[list[str], list[str]]:
    """Return the programs that are wrong without a mutant, and the mutants that no run finds."""
    store = dist.FileStore(place, here.size)
    dist.init_process_group(
        "multiring", store=store, rank=here.rank, world_size=here.size, timeout=timedelta(seconds=5)
    )
    device = torch.device("cuda", torch.cuda.current_device())
    wrong, found, number = [], [], 0
    for program in dict.fromkeys(program for program, _ in MUTANTS.values()):
        number += 1
        if not agreed(here, store, number, own=is_right(program, here, device)):
            wrong.append(program.__name__)
    for name, (program, mutate) in MUTANTS.items():
        with Patch.context() as patch:
            mutate(patch)
            for _ in tries():
                number += 1
                try:
                    own = is_right(program, here, device)
                except RuntimeError:
                    own = False
                if not agreed(here, store, number, own=own):
                    break
            else:
                found.append(name)
        torch.cuda.synchronize()
        device_staging._known.memory.clear()  # blocks that two users hold must not be used again
    return wrong, found


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int, tmp_path: Path) -> None:
    for wrong, found in run_cuda(missed, str(tmp_path / "meet"), devices=2, standin={"seed": seed, **LATE}):
        assert not wrong
        assert not found
