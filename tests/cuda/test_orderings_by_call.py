"""Orderings that protect single calls: without each, a program written for it gives wrong values."""

import itertools
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cuda.test_device_staging import wrong_rounds
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.mutants import LATE, SEEDS, Patch, busy, judged, late_copy, require_needed, side_stream
from tests.support.orderings import without
from tests.support.ranks import Here
from torch import nn

import multiring
import multiring.torch as mt
from multiring._runtime.engines.pinned_memory import PinnedBlock
from multiring.torch.device_staging import DeviceStaging, staging_of
from multiring.torch.gradients.change_detection import LateComparison

COUNT = 1 << 17  # a block of its own registration
EVENT = torch.cuda.Event
numbers = itertools.count()


def occupy(stream: Any) -> None:
    with torch.cuda.stream(stream):
        busy()


# ---- programs: each returns whether its results are right ----


def normalises(here: Here, device: torch.device) -> bool:
    module: Any = mt.SyncBatchNorm(3).to(device)
    values = torch.arange(24.0).view(8, 3) + here.rank
    given = values.to(device)
    occupy(staging_of(device)._to_host)
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
        occupy(self._to_host)
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
    occupy(staging._to_host)
    copied = staging.to_host(source, staging.pinned(group, COUNT, torch.float32).tensor)
    again = staging.pinned(group, COUNT, torch.float32)
    again.array[:] = 5
    copied.synchronize()
    return bool((again.array == 5).all())


def writes_from_a_free_block(here: Here, device: torch.device) -> bool:  # noqa: ARG001
    staging, group = staging_of(device), multiring.world()
    target, host = torch.empty(COUNT, device=device), staging.pinned(group, COUNT, torch.float32)
    host.array[:] = 3
    occupy(staging._to_device)
    staging.to_device(host.tensor, target)
    del host
    again = staging.pinned(group, COUNT, torch.float32)
    again.array[:] = 5
    return bool((target.cpu() == 3).all())


def overlaps(here: Here, device: torch.device) -> bool:  # noqa: ARG001
    return wrong_rounds(3, device) == 0


def compares(here: Here, device: torch.device) -> bool:  # noqa: ARG001
    """Compare elements that another stream has made, and that nobody keeps, with a busy stream."""
    recorded, current = (torch.arange(64.0, device=device) for _ in range(2))
    host = torch.empty(128, pin_memory=True)  # the comparison will copy to this memory
    host.copy_(torch.arange(128.0))
    torch.cuda.synchronize()
    del host
    with Patch.context() as patch, torch.cuda.stream(side_stream()):
        patch.setattr(torch, "cat", late_cat)
        entry: Any = SimpleNamespace(name="weight")
        compared = LateComparison([(entry, recorded, current)])
    del recorded, current
    others = [torch.full((64,), 70.0 + each, device=device) for each in range(4)]
    is_equal = compared.changed() == ""
    torch.cuda.synchronize()
    return is_equal and [each[0].item() for each in others] == [70.0, 71.0, 72.0, 73.0]


def late_cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join tensors by late copies on the current stream. An operator of the stand-ins reads when it is called."""
    joined = torch.empty(sum(map(len, tensors)), device=tensors[0].device)
    ends = list(accumulate(map(len, tensors)))
    late_copy([joined[end - len(each) : end] for end, each in zip(ends, tensors, strict=True)], tensors)
    return joined


# ---- mutants ----


def leave_out(owner: Any, method: str, *sites: str) -> Callable[[Patch], None]:
    """Return a mutant without the calls of `method` at `sites`."""
    return lambda patch: patch.setattr(owner, method, without(getattr(owner, method), *sites))


ALL = "torch/device_staging.py DeviceStaging"
LINE = "_frontend/submission_line.py Submission"
LATER = "torch/gradients/change_detection.py _CopiedElements"
Program = Callable[[Here, torch.device], bool]
MUTANTS: dict[str, tuple[Program, Callable[[Patch], None]]] = {
    "statistics before their copy": (
        normalises,
        leave_out(EVENT, "synchronize", f"{LINE}.submit: event.synchronize", f"{LINE}.await_events: event.synchronize"),
    ),
    "broadcast before the copy": (
        broadcasts,
        leave_out(EVENT, "synchronize", "torch/gradients/parameters.py _broadcast_from_devices: event.synchronize"),
    ),
    "block used again under a copy to it": (
        reads_into_a_free_block,
        leave_out(PinnedBlock, "note", f"{ALL}.all_to_host_behind: block.note"),
    ),
    "block used again under a copy from it": (
        writes_from_a_free_block,
        leave_out(PinnedBlock, "note", f"{ALL}.all_to_device: block.note"),
    ),
    "streams that nothing is behind": (overlaps, leave_out(EVENT, "record", f"{ALL}.reached: mark.record")),
    "events that nothing is behind": (overlaps, leave_out(EVENT, "record", f"{ALL}._recorded: event.record")),
    "elements compared before their copies": (
        compares,
        leave_out(EVENT, "synchronize", f"{LATER}.changed: self._event.synchronize"),
    ),
    "copies that no event is behind": (
        compares,
        leave_out(EVENT, "record", f"{LATER}.__init__: self._event.record"),
    ),
    "recorded elements used again": (
        compares,
        leave_out(torch.Tensor, "record_stream", f"{LATER}.__init__: recorded.record_stream"),
    ),
    "gradient used again": (
        compares,
        leave_out(torch.Tensor, "record_stream", f"{LATER}.__init__: current.record_stream"),
    ),
}


def caught(here: Here) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether the program is right without it, and with it, on this rank."""
    mt.init()
    device = torch.device("cuda", torch.cuda.current_device())
    return judged(MUTANTS, lambda program: program(here, device))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    require_needed(run_cuda(caught, devices=2, standin={"seed": seed, **LATE}))
