"""Each ordering of the hierarchical path is needed: a reduction is wrong if it is left out."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cuda.test_hierarchical import enter
from tests.cuda.test_nccl_collectives import program
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.mutants import LATE, SEEDS, Patch, busy, judged, late_copy, require_needed, side_stream
from tests.support.orderings import without
from tests.support.ranks import Here

from multiring._runtime.group.engine_calls import EngineCalls, EngineHandle
from multiring.torch.device_staging import DeviceStaging
from multiring.torch.hierarchical_path import HierarchicalReduction

FILE = "torch/hierarchical_path.py"


def hasty_copy(patch: Patch) -> None:
    site = f"{FILE} _ToHosts._copy: trip.scattered.order"
    patch.setattr(EngineHandle, "order", without(EngineHandle.order, site))


def hasty_network(patch: Patch) -> None:
    site = f"{FILE} _ToHosts._copy: to_host.synchronize"
    patch.setattr(torch.cuda.Event, "synchronize", without(torch.cuda.Event.synchronize, site))


def hasty_result(patch: Patch) -> None:
    site = f"{FILE} HierarchicalHandle.order: gathered.order"
    patch.setattr(EngineHandle, "order", without(EngineHandle.order, site))


def hasty_gather(patch: Patch) -> None:
    original = EngineCalls.buffer_of

    def buffer_of(self: EngineCalls, array: Any, *, writes: bool) -> Any:
        if threading.current_thread().name != "multiring from other hosts":
            return original(self, array, writes=writes)
        with torch.cuda.stream(side_stream()):
            return original(self, array, writes=writes)

    patch.setattr(EngineCalls, "buffer_of", buffer_of)


def hasty_reduction(patch: Patch) -> None:
    original = HierarchicalReduction._begun

    def begun(self: HierarchicalReduction, *arguments: Any) -> Any:
        with torch.cuda.stream(side_stream()):
            return original(self, *arguments)

    patch.setattr(HierarchicalReduction, "_begun", begun)


MUTANTS: dict[str, tuple[Callable[[Here, torch.device], bool], Callable[[Patch], None]]] = {
    "NCCL reduces before the kernels": (program, hasty_reduction),
    "copy to the host before NCCL reduces": (program, hasty_copy),
    "network before the copy to the host": (program, hasty_network),
    "NCCL gathers before the copy back": (program, hasty_gather),
    "kernels before NCCL gathers": (program, hasty_result),
}


def slow_down(patch: Patch, _program: object) -> None:
    """Widen the moments that orderings protect: copies within the device, and to and from the host, are late."""
    patch.setattr(torch, "_foreach_copy_", late_copy)
    for name in ("to_host", "to_device"):
        patch.setattr(DeviceStaging, name, late(getattr(DeviceStaging, name)))


def late(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return `copy`, on a stream that is busy if a thread of the path calls it."""

    def copied(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name.endswith("other hosts"):
            busy()
        return copy(*arguments, **options)

    return copied


def caught(here: Here) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether the program is right without it, and with it, on this rank."""
    device = enter(here)
    return judged(MUTANTS, lambda one: one(here, device), slow_down)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    require_needed(run_cuda(caught, hosts=(2, 2), standin={"seed": seed, **LATE}))
