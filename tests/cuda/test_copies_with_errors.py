"""An error between a copy and its event leaves no copy under way: memory that is used again keeps its new values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.standin.torch_devices import fail_call_here, last_error
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.mutants import LATE, busy
from tests.support.ranks import Here
from torch import Tensor

import multiring
import multiring.torch as mt
from multiring.errors import ArgumentError
from multiring.torch import device_staging
from multiring.torch.device_staging import DeviceStaging, staging_of

COUNT = 5000
INVALID_VALUE, OUT_OF_MEMORY = 1, 2

Copies = Callable[[DeviceStaging, list[Tensor], list[Tensor]], Any]
TO_HOST: dict[str, Copies] = {
    "waits": lambda staging, sources, targets: staging.to_host(sources[0], targets[0], waits=True),
    "side stream": lambda staging, sources, targets: staging.all_to_host(sources, targets),
}
TO_DEVICE: dict[str, Copies] = {
    "caller's stream": lambda staging, sources, targets: staging.all_to_device(sources, targets),
    "behind an event": lambda staging, sources, targets: staging.all_to_device(sources, targets, staging.reached()),
}


def fail(copies: Copies, staging: DeviceStaging, sources: list[Tensor], targets: list[Tensor], *, late: bool) -> None:
    """Start copies that fail: at their event with `late`, else at the second copy."""
    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(staging, "_recorded", refuse)
        elif len(sources) > 1:
            sources[1] = sources[1][:7]
        busy()
        try:
            copies(staging, sources, targets)
        except RuntimeError as error:  # without pytest.raises, which would keep the frames and their tensors
            found = str(error)
        else:
            found = "no error"
    assert ("no event" if late else "size") in found, found


def refuse(_stream: Any) -> None:
    raise RuntimeError("no event")


def copies_with_errors(here: Here) -> None:
    assert here.size == 1
    mt.init()
    staging, group = staging_of(torch.device("cuda", 0)), multiring.world()

    def pinned(value: float) -> Tensor:
        made = staging.pinned_tensor(group, COUNT, torch.float32)
        made.fill_(value)
        return made

    for late in (True, False):
        for name, copies in TO_HOST.items():
            if not late and name == "waits":
                continue  # a single copy
            sources = [torch.full((COUNT,), 1.0, device="cuda") for _ in range(2)]
            targets = [pinned(2.0) for _ in range(2)]
            fail(copies, staging, sources, targets, late=late)
            del sources, targets
            again, fresh = [pinned(3.0) for _ in range(2)], torch.full((COUNT,), 4.0, device="cuda")
            torch.cuda.synchronize()
            assert all(each.eq(3.0).all() for each in again), f"{name}: a copy wrote memory that was used again"
            assert fresh.eq(4.0).all()
            del again
        for name, copies in TO_DEVICE.items():
            sources = [pinned(1.0) for _ in range(2)]
            targets = [torch.full((COUNT,), 2.0, device="cuda") for _ in range(2)]
            kept = targets[0]
            fail(copies, staging, sources, targets, late=late)
            del sources, targets
            again, fresh = [pinned(3.0) for _ in range(2)], torch.full((COUNT,), 4.0, device="cuda")
            torch.cuda.synchronize()
            assert kept.eq(1.0).all(), f"{name}: a copy read memory that was used again"
            assert fresh.eq(4.0).all(), f"{name}: a copy wrote memory that was used again"
            del again
    # The blocks come back: the next round registers nothing.
    memory = device_staging._known.memory_of(group)
    registrations = memory.registrations
    for _ in range(10):
        pinned(5.0)
    assert memory.registrations == registrations


def test_an_error_leaves_no_copy_under_way() -> None:
    run_cuda(copies_with_errors, hosts=1, devices=1, standin=LATE)


def fail_to_pin(here: Here) -> None:
    assert here.size == 1
    mt.init()
    staging, group = staging_of(torch.device("cuda", 0)), multiring.world()
    torch.ones(1, device="cuda") + 1  # the allocator has memory: the next calls of CUDA are multiring's
    fail_call_here(OUT_OF_MEMORY, 0)
    with pytest.raises(ArgumentError, match=f"cannot pin .* error {OUT_OF_MEMORY}"):
        staging.pinned_tensor(group, 1 << 20, torch.uint8)
    assert last_error() == 0
    kept = staging.pinned_tensor(group, 1 << 20, torch.uint8)
    del kept
    fail_call_here(INVALID_VALUE, 0)
    memory = device_staging._known.memory_of(group)
    memory._sort_returned()
    memory._free.clear()  # the block is unregistered
    assert fail_call_here(0, -1) == -1, "CUDA was not called"
    assert last_error() == 0
    assert torch.equal((torch.ones(3, device="cuda") * 2).cpu(), torch.full((3,), 2.0))


def test_a_refused_pinning_leaves_no_error() -> None:
    """CUDA keeps the error of a call for the thread, and torch's next kernel would report it as its own."""
    run_cuda(fail_to_pin, hosts=1, devices=1)
