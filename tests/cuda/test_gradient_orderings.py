"""Each ordering of device buckets is needed: gradients are wrong, or an error is raised, if it is left out.

`make test-cuda` takes one seed of the stand-ins' delays; benchmarks/evidence/torch/on_devices.py takes five.
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cuda.test_gradient_cases import (
    by_hand,
    losses_of_divided,
    losses_on_streams,
    rows_of_dense,
    shared,
    warnings_of_torch,
)
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import HOST, Program, join, mean_loss, model_of, own_batch
from tests.support.mutants import LATE, SEEDS, Patch, busy, judged, nothing, require_needed, side_stream
from tests.support.ranks import Here
from torch.nn.parallel import DistributedDataParallel

import multiring.torch as mt
from multiring import Group
from multiring.torch.ddp import comm_hook
from multiring.torch.device_staging import DeviceStaging
from multiring.torch.gradients import device_buckets
from multiring.torch.gradients.device_buckets import DeviceBucket, HostCopies, OnDevice, StagedOrder
from multiring.torch.gradients.parameter_gradient import ParameterGradient

SLOW_S = 0.006  # how much later rank 1 starts the host's reductions
Run = Callable[[Here, torch.device], list[float]]


# ---- programs ----


def by_small_buckets(here: Here, device: torch.device) -> list[float]:
    return Program(bucket_bytes=600).losses(here, device, 5)


def by_adasum(here: Here, device: torch.device) -> list[float]:
    return Program(op=mt.Adasum).losses(here, device, 4)


def by_norms(here: Here, device: torch.device) -> list[float]:
    return Program("lars").losses(here, device, 4)


def by_rows(here: Here, device: torch.device) -> list[float]:
    return [float(each) for each in by_hand(here, device)]


def by_streams(here: Here, device: torch.device) -> list[float]:
    if device == HOST:
        return Program().losses(here, HOST, 8)[:8]
    with warnings_of_torch():
        return losses_on_streams(here, device, uses_streams=True)


def by_hook(here: Here, device: torch.device) -> list[float]:
    with torch.cuda.stream(None if device == HOST else side_stream()):
        return losses_of_hook(here, device)


def losses_of_hook(here: Here, device: torch.device) -> list[float]:
    model = model_of("perceptron", device)
    whole = DistributedDataParallel(model, bucket_cap_mb=0.002)
    whole.register_comm_hook(mt.BucketSharing(), mt.allreduce_hook)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = mean_loss(whole, own_batch(here, step, "perceptron", device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(each) for each in losses]


def by_first_backward(here: Here, device: torch.device) -> list[float]:
    """Return sums of the gradients of a backward on a stream that does not wait for the stream of the buckets."""
    model = model_of("perceptron", device)
    pair = own_batch(here, 0, "perceptron", device)
    context: Any = nullcontext()
    if device == HOST:
        optimizer = shared(model)
    else:
        torch.cuda.synchronize()
        with Patch.context() as patch:
            patch.setattr(torch, "zeros", late_zeros)
            optimizer = shared(model)
        context = torch.cuda.stream(side_stream())
    with context, warnings_of_torch():
        mean_loss(model, pair).backward()
        optimizer.synchronize()
        torch.cuda.synchronize()
        return [float(each.grad.sum()) for each in model.parameters() if each.grad is not None]


def late_zeros(*arguments: Any, **options: Any) -> torch.Tensor:
    """Return zeros that a stream writes much later."""
    ready = torch.full(arguments, 0, **options)
    if not ready.is_cuda:
        return ready
    torch.cuda.synchronize()
    for _ in range(20):
        busy()
    return torch.empty_like(ready).copy_(ready)


def by_halves(here: Here, device: torch.device) -> list[float]:
    return losses_of_divided(here, device, bucket_bytes=64)


# ---- mutants ----


def hasty_copy_back(patch: Patch) -> None:
    original = StagedOrder.post

    def post(self: StagedOrder, copied: Any, start: Callable[[], Any], end: Callable[[], Any]) -> Any:
        def hasty() -> Callable[[], object]:
            threading.Thread(target=start(), daemon=True).start()
            return nothing

        return original(self, copied, hasty, end)

    patch.setattr(StagedOrder, "post", post)


def hasty_copies(patch: Patch) -> None:
    original = HostCopies.__init__

    def start(self: HostCopies, *arguments: Any) -> None:
        original(self, *arguments)
        self.copied.clear()

    patch.setattr(HostCopies, "__init__", start)


def hasty_zeros(patch: Patch, kind: type[DeviceBucket] = OnDevice) -> None:
    original = kind.come_behind

    def come_behind(self: DeviceBucket) -> None:
        self._seen.append(self._module.current_stream(self._device))
        original(self)

    patch.setattr(kind, "come_behind", come_behind)


def hasty_norms(patch: Patch) -> None:
    original = torch.cuda.Event.synchronize

    def synchronize(self: Any) -> None:
        if threading.current_thread().name.startswith("multiring"):
            original(self)

    patch.setattr(torch.cuda.Event, "synchronize", synchronize)


def one_group(patch: Patch) -> None:
    original = Group.twin_for
    patch.setattr(Group, "twin_for", lambda self, name: self if name == "buckets of devices" else original(self, name))


def any_order(patch: Patch) -> None:
    original = StagedOrder.post

    def post(self: StagedOrder, copied: Any, start: Callable[[], Any], end: Callable[[], Any]) -> Any:
        def late() -> Any:
            time.sleep(random.random() / 50)  # noqa: S311 -- not for secrets
            return start()

        return original(StagedOrder(self._group), copied, late, end)

    patch.setattr(StagedOrder, "post", post)


Mutant = tuple[Run, Callable[[Patch], Any]]
MUTANTS: dict[str, Mutant] = {
    "host before the copy": (by_small_buckets, lambda patch: patch.setattr(device_buckets, "_wait_for", nothing)),
    "Adasum before the copy": (by_adasum, hasty_copies),
    "norms before the copy": (by_norms, hasty_norms),
    "copy back before the host": (by_small_buckets, hasty_copy_back),
    "kernels before the copy back": (by_small_buckets, lambda patch: patch.setattr(OnDevice, "come_after", nothing)),
    "hook's result before the copy back": (by_hook, lambda patch: patch.setattr(OnDevice, "come_after", nothing)),
    "DDP before the hook's result": (
        by_hook,
        lambda patch: patch.setattr(comm_hook, "Future", lambda devices: torch.futures.Future()),  # noqa: ARG005
    ),
    "copy before the other streams": (by_streams, lambda patch: patch.setattr(OnDevice, "_await_writers", nothing)),
    "gradients before the zeros": (by_first_backward, hasty_zeros),
}
# These disturb how the ranks' operations meet: a group cannot be used afterwards.
DISORDERS: dict[str, Mutant] = {
    "rows before their copy": (by_rows, lambda patch: patch.setattr(device_buckets, "_wait_for", nothing)),
    "host and device in one group": (by_halves, one_group),
    "buckets of a device in any order": (by_halves, any_order),
}


def slow_down(here: Here, patch: Patch) -> None:
    """Widen the moments that orderings protect: late copies back, late writes of side streams.

    Rank 1 starts the host's reductions later, so that each takes a while on rank 0.
    """
    wait_for, to_device, take_in = device_buckets._wait_for, DeviceStaging.to_device, ParameterGradient.take_in

    def slow_wait_for(copied: Any) -> None:
        wait_for(copied)
        time.sleep(SLOW_S * here.rank)

    def slow_to_device(self: DeviceStaging, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.stream(self._to_device):
            busy()
        return to_device(self, *arguments, **options)

    def slow_take_in(self: ParameterGradient, gradient: Any, *, hands_out: bool) -> None:
        if gradient.is_cuda and torch.cuda.current_stream() != torch.cuda.default_stream():
            busy()
        take_in(self, gradient, hands_out=hands_out)

    patch.setattr(device_buckets, "_wait_for", slow_wait_for)
    patch.setattr(DeviceStaging, "to_device", slow_to_device)
    patch.setattr(ParameterGradient, "take_in", slow_take_in)


class Compared:
    """Runs of programs on a device, compared with one run on the host."""

    def __init__(self, here: Here, device: torch.device) -> None:
        self._here, self._device = here, device
        self._expected: dict[Run, list[float]] = {}

    def is_right(self, program: Run) -> bool:
        """Return whether a run of `program` on the device has the values of the host."""
        if program not in self._expected:
            self._expected[program] = program(self._here, HOST)
        found = program(self._here, self._device)
        torch.cuda.synchronize()
        return bool(found == pytest.approx(self._expected[program], rel=1e-6))


def caught(here: Here, place: str) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether the program is right without it, and with it, on this rank."""
    device = join(here, check_first_steps=False, device_path="staged")  # the check finds many a mutant
    dist.init_process_group(
        "cpu:multiring,cuda:nccl", init_method=f"file://{place}", rank=here.rank, world_size=here.size
    )
    found = judged(MUTANTS, Compared(here, device).is_right, lambda patch, _: slow_down(here, patch))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int, tmp_path: Path) -> None:
    require_needed(run_cuda(caught, str(tmp_path / "meet"), devices=2, standin={"seed": seed, **LATE}))


def disordered(here: Here, name: str) -> bool:
    device = join(here, check_first_steps=False, device_path="staged")  # the check finds many a mutant
    random.seed(here.rank)
    program, mutate = DISORDERS[name]
    library: Any = torch.library.Library
    operators = library("aten", "IMPL")
    operators.impl("_to_sparse.sparse_dim", rows_of_dense, "CUDA")
    compared = Compared(here, device)
    assert compared.is_right(program)
    with Patch.context() as patch, suppress(Exception):
        mutate(patch)
        return compared.is_right(program)
    return False


@pytest.mark.parametrize("name", DISORDERS)
def test_the_order_of_buckets_is_needed(name: str) -> None:
    for seed in SEEDS:
        assert not all(run_cuda(disordered, name, devices=2, standin={"seed": seed, **LATE})), seed
