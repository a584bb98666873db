"""All-reduces of CUDA tensors by NCCL: values, errors on all ranks, and the orderings that they need."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.standin.torch_devices import host_waits
from tests.support.cuda_torch_ranks import report_of_cuda, run_cuda
from tests.support.mutants import LATE, SEEDS, Patch, busy, judged, late_copy, require_needed, side_stream
from tests.support.ranks import Here

import multiring.torch as mt
from multiring._runtime.engines.nccl_communicator import NcclCommunicator
from multiring.errors import CollectiveError, MultiringError
from multiring.torch.collectives import by_nccl
from multiring.torch.device_staging import DeviceStaging

SOON_S = 20  # far below the time-out of a stall, with a loaded machine
OPS: dict[str, Any] = {
    "sum": torch.sum,
    "average": torch.mean,
    "min": torch.amin,
    "max": torch.amax,
    "product": torch.prod,
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DECISION_S = 120


def enter(**settings: Any) -> torch.device:
    """Join the job; small tensors use NCCL too."""
    by_nccl.LEAST_BYTES = 0
    mt.init(**settings)
    return torch.device("cuda", torch.cuda.current_device())


def enter_nccl(here: Here) -> torch.device:
    """Join the job, and wait until the ranks reduce by NCCL."""
    device = enter()
    end_s = time.monotonic() + DECISION_S
    while True:
        assert mt.allreduce(torch.ones(2, device=device), op="sum").tolist() == [here.size] * 2
        ready = mt.allgather_object(mt.device_path())
        if set(ready) == {"nccl"}:
            return device
        assert time.monotonic() < end_s, ready


def refuse_staging(*_arguments: Any, **_options: Any) -> None:
    raise AssertionError("a copy through host memory")


def own_values(rank: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(1, 4, (3, 5), generator=dice).to(dtype)


def values(here: Here) -> int:
    device, waits = enter_nccl(here), 0
    with Patch.context() as patch:
        patch.setattr(DeviceStaging, "all_to_host", refuse_staging)
        patch.setattr(DeviceStaging, "all_to_device", refuse_staging)
        for salt, dtype in enumerate((*FLOATS, *INTEGERS)):
            every = torch.stack([own_values(rank, dtype, salt) for rank in range(here.size)]).double()
            own = own_values(here.rank, dtype, salt).to(device)
            for op in OPS if dtype.is_floating_point else [op for op in OPS if op != "average"]:
                wanted = OPS[op](every, dim=0).to(dtype)
                torch.cuda.synchronize()
                before = host_waits()
                copy = own.clone()
                mt.allreduce_(copy, op=op, name=f"{op} {dtype}")
                found = [mt.allreduce(own, op=op), copy, mt.allreduce(own.t(), op=op).t()]
                found += mt.grouped_allreduce([own, own], op=op)
                found += mt.grouped_allreduce_([own.clone(), own.t().contiguous().t()], op=op)
                waits += host_waits() - before
                assert all(torch.equal(each.cpu(), wanted) for each in found), (op, dtype)
    parameter = torch.full((4,), 2.0, device=device, requires_grad=True)
    torch.autograd.backward(mt.allreduce(parameter, op="sum").sum())
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [here.size] * 4
    assert mt.allreduce(torch.ones(3, dtype=torch.bool, device=device), op="sum").tolist() == [True] * 3
    return waits


@pytest.mark.parametrize("devices", [2, 4])
def test_values(devices: int) -> None:
    assert run_cuda(values, devices=devices) == [0] * devices


def sizes(here: Here) -> list[int]:
    """Return how many reductions of small and of large tensors NCCL did."""
    device, counts = enter_nccl(here), []
    by_nccl.LEAST_BYTES = 64 << 10
    for elements in (16 << 10, (16 << 10) - 1):
        with Patch.context() as patch:
            done = reductions_by_nccl(patch)
            assert mt.allreduce(torch.ones(elements, device=device), op="sum").eq(here.size).all()
            parts = [torch.ones(elements // 2, device=device), torch.ones(elements - elements // 2, device=device)]
            assert all(each.eq(here.size).all() for each in mt.grouped_allreduce(parts, op="sum"))
            counts.append(done["all_reduce"])
    return counts


def test_small_tensors_are_staged() -> None:
    assert by_nccl.LEAST_BYTES == 64 << 10
    assert run_cuda(sizes, devices=2) == [[2, 0]] * 2


# ---- names, orders, sets ----


def reductions_by_nccl(patch: Patch) -> Counter[str]:
    found: Counter[str] = Counter()
    original = NcclCommunicator.put

    def put(self: NcclCommunicator, request: Any, *arguments: Any) -> None:
        found[request.collective.value] += 1
        original(self, request, *arguments)

    patch.setattr(NcclCommunicator, "put", put)
    return found


def named(here: Here) -> tuple[int, int]:
    """Return how many reductions NCCL did: in the ranks' common order, and in different orders."""
    device, counts = enter_nccl(here), []
    for is_mixed in (False, True):
        with Patch.context() as patch:
            done = reductions_by_nccl(patch)
            order = list(range(12))[:: -1 if is_mixed and here.rank else 1]
            handles = {
                number: mt.allreduce_async_(
                    torch.full((6, number + 1), 1.0 + number, device=device), op="sum", name=str(number)
                )
                for number in order
            }
            for number in sorted(handles):
                assert mt.synchronize(handles[number]).unique().tolist() == [(1.0 + number) * here.size]
            torch.cuda.synchronize()
            mt.barrier()
            counts.append(done["all_reduce"])
    mt.allreduce_async(torch.ones(3, device=device), name="dropped")
    mt.allreduce_async_(torch.ones(3, device=device))
    if here.rank:
        assert mt.allreduce(torch.ones(3, device=device), op="sum").tolist() == [here.size - 1.0] * 3
    assert mt.join() >= 0
    assert mt.allreduce(torch.ones(3, device=device), op="sum").tolist() == [here.size] * 3
    return counts[0], counts[1]


def test_names_in_any_order() -> None:
    assert run_cuda(named, devices=2) == [(12, 12)] * 2


def sets(here: Here) -> None:
    """Two overlapping sets and an optimizer's buckets use NCCL in different orders."""
    chosen = [mt.ProcessSet([0, 1, 2]), mt.ProcessSet([1, 2, 3])]
    device = enter(process_sets=chosen)
    layer = torch.nn.Linear(3, 3).to(device)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())
    for step in range(12):
        optimizer.zero_grad()
        layer(torch.ones(2, 3, device=device)).sum().backward()
        handles = [
            (number, mt.allreduce_async(torch.full((5,), 1.0 + step, device=device), op="sum", process_set=each))
            for number, each in list(enumerate(chosen))[:: 1 if here.rank < 2 else -1]
            if here.rank in (each.ranks or [])
        ]
        for number, handle in handles:
            assert mt.synchronize(handle).tolist() == [3.0 + 3 * step] * 5, (step, number)
        optimizer.step()
        time.sleep(0.02)
    assert all(mt.device_path(each) == "nccl" for each in chosen if here.rank in (each.ranks or []))


def test_overlapping_sets() -> None:
    run_cuda(sets, devices=4)


# ---- errors ----


def mismatches(here: Here) -> list[str]:
    device, found = enter_nccl(here), []
    wrong: dict[str, Any] = {
        "shape": torch.ones(2 + here.rank, device=device),
        "type": torch.ones(2, device=device, dtype=(torch.float32, torch.float64)[here.rank]),
        "device": torch.ones(2, device=("cpu", device)[here.rank]),
        "group": None,
    }
    with Patch.context() as patch:
        done = reductions_by_nccl(patch)
        for name, tensor in wrong.items():
            try:
                if tensor is None:
                    mt.grouped_allreduce([torch.ones(2, device=device)] * (1 + here.rank))
                else:
                    mt.allreduce(tensor, name=name)
            except CollectiveError as error:
                found.append(str(error).partition("the ranks do not agree on ")[2].partition(";")[0])
            assert mt.allreduce(torch.ones(2, device=device), op="sum").tolist() == [2.0, 2.0]
        torch.cuda.synchronize()
        assert done["all_reduce"] == len(wrong)
    return found


def test_mismatches_leave_the_set_usable() -> None:
    for found in run_cuda(mismatches, devices=2):
        assert found[0].startswith("the shape: rank 0: (2")
        assert found[1].startswith("the data type: rank 0: float32")
        assert found[2].startswith("the device: rank 0: cpu")
        assert found[3].startswith("the tensors: rank 0: 1")


def wished(here: Here) -> str:
    assert here.size == 2
    os.environ["MULTIRING_DEVICE_PATH"] = "nccl"
    device = enter()
    with pytest.raises(MultiringError) as error:
        mt.allreduce(torch.ones(2, device=device))
    return f"{type(error.value).__name__}: {error.value}"


def test_a_wish_for_nccl_that_cannot_be() -> None:
    for text in run_cuda(wished, devices=2, standin={"devices": 1}):
        assert (
            "MULTIRING_DEVICE_PATH=nccl, but ranks [0, 1] cannot use NCCL: ranks 0 and 1 share the GPU 0000:01:00"
            in text
        )


def differing_settings(here: Here) -> str:
    os.environ["MULTIRING_DEVICE_PATH"] = ("auto", "staged")[here.rank]
    device = enter()
    with pytest.raises(CollectiveError) as error:
        mt.allreduce(torch.ones(2, device=device))
    return str(error.value)


def test_settings_that_differ() -> None:
    for text in run_cuda(differing_settings, devices=2):
        assert "the ranks do not agree on the device path: rank 0: nccl if all ranks can; rank 1: none" in text


def dying(here: Here, phase: str) -> bool:
    device = enter_nccl(here)
    x = torch.ones(1000, device=device)
    if here.rank == 1:
        if phase == "after":
            mt.allreduce_async(x)
            time.sleep(0.1)
        elif phase == "on the device":
            busy()
            mt.allreduce_async(x * 1)
        elif phase == "agreed":
            Patch().setattr(by_nccl._Reduction, "follow", lambda _: os.kill(os.getpid(), signal.SIGKILL))
            mt.allreduce(x)
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(MultiringError, match="rank 1"):  # noqa: PT012 -- in which call is not known
        for _ in range(3):
            mt.allreduce(x)
            torch.cuda.synchronize()
            time.sleep(0.3)
    assert time.monotonic() - began_s < SOON_S
    return float(torch.ones(3, device=device).sum()) == 3


@pytest.mark.parametrize("phase", ["before", "agreed", "on the device", "after"])
def test_a_rank_dies(phase: str) -> None:
    report = report_of_cuda(dying, phase, devices=2)
    assert report.outcomes[0].value is True, report.outcomes[0]
    assert report.outcomes[1].exit_code == -signal.SIGKILL


# ---- orderings ----


def program(here: Here, device: torch.device) -> bool:
    """Return whether reductions on several streams, whose inputs come late, are right on this rank."""
    is_right = True
    streams = [torch.cuda.default_stream(), side_stream(), side_stream()]
    for number in range(6):
        source, other = streams[number % 3], streams[(number + 1) % 3]
        with torch.cuda.stream(source):
            x = torch.full((3000,), float(number), device=device)
            busy()
            x = x + here.rank
            handle = (mt.allreduce_async, mt.allreduce_async_)[number % 2](x, op="sum")
            del x
            torch.full((3000,), 77.0, device=device)
        with torch.cuda.stream(other):
            found = mt.synchronize(handle)
            busy()
            kept = torch.empty_like(found).copy_(found)
            del found
        with torch.cuda.stream(source):
            late = torch.full((3000,), 55.0, device=device)
        with torch.cuda.stream(other):
            wanted = number * here.size + sum(range(here.size))
            is_right = bool(kept.cpu().eq(wanted).all()) and is_right
        del late
    torch.cuda.synchronize()
    return is_right


def hasty_nccl(patch: Patch) -> None:
    patch.setattr(by_nccl._Reduction, "_behind_copy", lambda self: self._set_path.stream_of(self._device))


def hasty_result(patch: Patch) -> None:
    patch.setattr(by_nccl._Reduction, "_order", lambda _self, _begun: None)


def hasty_reuse(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "record_stream", lambda _self, _stream: None)


def hasty_host(patch: Patch) -> None:
    original = torch.cuda.Event.synchronize

    def synchronize(self: Any) -> None:
        if threading.current_thread().name != "multiring follow-ups":
            original(self)

    patch.setattr(torch.cuda.Event, "synchronize", synchronize)


def stage(here: Here, patch: Patch, first: int) -> None:
    """Let the ranks from `first` on refuse NCCL, and copies come late."""
    to_host = DeviceStaging.all_to_host

    def slow_to_host(self: DeviceStaging, *arguments: Any) -> Any:
        with torch.cuda.stream(self._to_host):
            busy()
        return to_host(self, *arguments)

    patch.setattr(torch, "_foreach_copy_", late_copy)
    patch.setattr(DeviceStaging, "all_to_host", slow_to_host)
    if here.rank >= first:
        patch.setattr(by_nccl.SetPath, "ready", lambda _self: None)


# For each mutant: the first rank that refuses NCCL, and what leaves the ordering out.
MUTANTS: dict[str, tuple[int, Callable[[Patch], None]]] = {
    "NCCL before the copy": (2, hasty_nccl),
    "kernels before NCCL": (2, hasty_result),
    "memory used again": (2, hasty_reuse),
    "host before the copies": (0, hasty_host),
    "host before the copy of a buffer": (1, hasty_host),
}


def caught(here: Here) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether the program is right without it, and with it, on this rank."""
    device = enter_nccl(here)
    return judged(MUTANTS, lambda _: program(here, device), lambda patch, first: stage(here, patch, first))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    require_needed(run_cuda(caught, devices=2, standin={"seed": seed, **LATE}))
