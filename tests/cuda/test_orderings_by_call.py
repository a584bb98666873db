"""Orderings that protect single calls: without each, a program written for it gives wrong values."""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.cuda.test_device_staging import wrong_rounds
from tests.standin.torch_devices import CYCLES_PER_US
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.orderings import without
from tests.support.ranks import Here
from torch import nn

import multiring
import multiring.torch as mt
from multiring.torch.device_staging import DeviceStaging, PinnedBlock, staging_of

SEEDS = range(5 if "MULTIRING_TEST_ALL_SEEDS" in os.environ else 1)
LATE = {"delay_us": 1000}
LATE_US = 15_000
COUNT = 1 << 17  # a block of its own registration
TRIES = 5

Patch = pytest.MonkeyPatch
EVENT = torch.cuda.Event
numbers = itertools.count()


def busy(stream: Any) -> None:
    """Occupy a stream."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE_US * CYCLES_PER_US)


# ---- programs: each returns whether its results are right ----


def normalises(here: Here, device: torch.device) -> bool:
    module: Any = mt.SyncBatchNorm(3).to(device)
    values = torch.arange(24.0).view(8, 3) + here.rank
    given = values.to(device)
    busy(staging_of(device)._to_host)
    module(given)
    wanted = torch.stack([torch.arange(24.0).view(8, 3) + rank for rank in range(here.size)]).mean((0, 1)) * 0.1
    torch.cuda.synchronize()
    return torch.allclose(module.running_mean.cpu(), wanted, rtol=1e-5)


def broadcasts(here: Here, device: torch.device) -> bool:
    model, value = nn.Linear(40, 50).to(device), float(next(numbers))  # not what the block held before
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.full(each.shape, value + here.rank))
    to_host = DeviceStaging.to_host

    def late_to_host(self: DeviceStaging, *arguments: Any) -> Any:
        busy(self._to_host)
        return to_host(self, *arguments)

    with Patch.context() as patch:
        patch.setattr(DeviceStaging, "to_host", late_to_host)
        mt.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.cuda.synchronize()
    return all(bool((each == value).all()) for each in model.parameters())


def reads_into_a_free_block(here: Here, device: torch.device) -> bool:  # noqa: ARG001
    staging, group = staging_of(device), multiring.world()
    source = torch.full((COUNT,), 3.0, device=device)
    torch.cuda.synchronize()
    busy(staging._to_host)
    copied = staging.to_host(source, staging.pinned(group, COUNT, torch.float32).tensor)
    again = staging.pinned(group, COUNT, torch.float32)
    again.array[:] = 5
    copied.synchronize()
    return bool((again.array == 5).all())


def writes_from_a_free_block(here: Here, device: torch.device) -> bool:  # noqa: ARG001
    staging, group = staging_of(device), multiring.world()
    target, host = torch.empty(COUNT, device=device), staging.pinned(group, COUNT, torch.float32)
    host.array[:] = 3
    busy(staging._to_device)
    staging.to_device(host.tensor, target)
    del host
    again = staging.pinned(group, COUNT, torch.float32)
    again.array[:] = 5
    return bool((target.cpu() == 3).all())


def overlaps(here: Here, device: torch.device) -> bool:  # noqa: ARG001
    return wrong_rounds(3, device) == 0


# ---- mutants ----


def leave_out(owner: Any, method: str, *sites: str, patch: Patch) -> None:
    patch.setattr(owner, method, without(getattr(owner, method), *sites))


Program = Callable[[Here, torch.device], bool]
MUTANTS: dict[str, tuple[Program, Callable[..., None]]] = {
    "statistics before their copy": (
        normalises,
        partial(
            leave_out,
            EVENT,
            "synchronize",
            "_frontend/submission_line.py Submission.submit: event.synchronize",
            "_frontend/submission_line.py Submission.await_events: event.synchronize",
        ),
    ),
    "broadcast before the copy": (
        broadcasts,
        partial(
            leave_out,
            EVENT,
            "synchronize",
            "torch/gradients/parameters.py _broadcast_from_devices: event.synchronize",
        ),
    ),
    "block used again under a copy to it": (
        reads_into_a_free_block,
        partial(leave_out, PinnedBlock, "note", "torch/device_staging.py DeviceStaging.all_to_host_behind: block.note"),
    ),
    "block used again under a copy from it": (
        writes_from_a_free_block,
        partial(leave_out, PinnedBlock, "note", "torch/device_staging.py DeviceStaging.all_to_device: block.note"),
    ),
    "streams that nothing is behind": (
        overlaps,
        partial(leave_out, EVENT, "record", "torch/device_staging.py DeviceStaging.reached: mark.record"),
    ),
    "events that nothing is behind": (
        overlaps,
        partial(leave_out, EVENT, "record", "torch/device_staging.py DeviceStaging._recorded: event.record"),
    ),
}


def missed(here: Here) -> tuple[list[str], list[str]]:
    """Return the programs that are wrong without a mutant, and the mutants that no run finds."""
    mt.init()
    device = torch.device("cuda", torch.cuda.current_device())
    wrong, found = [], []
    for name, (program, mutate) in MUTANTS.items():
        if not all(mt.allgather_object(program(here, device))):
            wrong.append(name)
        for _ in range(TRIES):
            with Patch.context() as patch:
                mutate(patch=patch)
                own = program(here, device)
                torch.cuda.synchronize()
            if not all(mt.allgather_object(own)):
                break
        else:
            found.append(name)
    return wrong, found


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    for wrong, found in run_cuda(missed, devices=2, standin={"seed": seed, **LATE}):
        assert not wrong
        assert not found
