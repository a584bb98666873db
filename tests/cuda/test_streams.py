"""Streams, events and memory of torch's CUDA build on the stand-ins, beside the record of an H100."""

import ctypes
import json
import threading
from typing import Any

import pytest
import torch
from tests.standin.torch_devices import fail_allocations, fail_call, host_waits
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.ranks import Here

from multiring._verify.behaviours.table import BEHAVIOURS, recorded

# Recorded experiments. Each list runs in one process.
ALIKE = [
    ["torch_copies_and_the_host", "torch_warnings_of_synchronisation", "torch_allocator_reuse"],
    ["torch_streams_of_threads_and_of_backward", "torch_is_pinned", "torch_out_of_memory"],
    ["torch_dlpack_and_array_interface", "torch_fork_after_the_context"],
    ["torch_capture_of_two_streams", "nccl_captured_in_a_graph"],
    ["torch_errors_that_stay"],
    ["sticky_error"],
    ["nccl_after_a_sticky_error"],
    ["registered_memory_is_unmapped_and_mapped_again", "nccl_is_asynchronous"],
]


def experiment(_: Here, names: list[str]) -> dict[str, Any]:
    return json.loads(json.dumps({name: BEHAVIOURS[name]() for name in names}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", ALIKE, ids=lambda names: names[0])
def test_torch_behaves_as_on_the_device_of_the_record(names: list[str]) -> None:
    record = recorded()
    assert run_cuda(experiment, names, devices=1) == [{name: record[name] for name in names}]


class Hold:
    """Work on the current stream that lasts until `release`."""

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32).pin_memory()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_void_p(self._flag.data_ptr())
        assert ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2(stream, address, ctypes.c_uint32(1), 0) == 0

    def release(self) -> None:
        self._flag.fill_(1)


def orderings(here: Here) -> list[list[float]]:
    """Return what a consumer sees with and without each of three orderings."""
    assert here.size == 1
    side, seen = torch.cuda.Stream(), []
    host = torch.ones(1000).pin_memory()
    for is_ordered in (True, False):
        # A copy on the current stream, read on another
        device = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        hold = Hold()
        device.copy_(host, non_blocking=True)
        if is_ordered:
            side.wait_stream(torch.cuda.current_stream())
            hold.release()
        with torch.cuda.stream(side):
            found = [(device * 2)[0].item()]
        hold.release()
        # A result of another stream, read by the host
        torch.cuda.synchronize()
        back = torch.zeros(1000).pin_memory()
        with torch.cuda.stream(side):
            hold = Hold()
            back.copy_(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        if is_ordered:
            hold.release()
            event.synchronize()
        found.append(back[0].item())
        hold.release()
        # A block that is freed while another stream writes it
        torch.cuda.synchronize()
        block = torch.empty(1 << 20, device="cuda")
        with torch.cuda.stream(side):
            hold = Hold()
            block.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
        if is_ordered:
            block.record_stream(side)
        address = block.data_ptr()
        del block
        found.append(float(torch.empty(1 << 20, device="cuda").data_ptr() == address))
        hold.release()
        torch.cuda.synchronize()
        seen.append(found)
    return seen


def test_what_is_not_ordered_is_seen() -> None:
    assert run_cuda(orderings, devices=1) == [[[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]]


def count(_: Here) -> dict[str, int]:
    """Return how often some operations stop the calling thread."""
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    pinned, event = torch.ones(1000).pin_memory(), torch.cuda.Event()

    def elsewhere() -> None:
        thread = threading.Thread(target=torch.cuda.synchronize)
        thread.start()
        thread.join()

    calls: dict[str, Any] = {
        "operator": lambda: x.add_(1).sum(),
        "copy": lambda: pinned.copy_(x, non_blocking=True),
        "event of a stream": event.record,
        "wait of a stream": lambda: side.wait_event(event),
        "query": event.query,
        "of another thread": elsewhere,
        "item": x[0].item,
        "event": event.synchronize,
        "stream": side.synchronize,
        "device": torch.cuda.synchronize,
        "blocking copy": x.cpu,
        "mask": lambda: x[x > 0],
    }
    found = {}
    for name, call in calls.items():
        before = host_waits()
        call()
        found[name] = host_waits() - before
    return found


def test_host_synchronizations_are_counted_by_thread() -> None:
    (found,) = run_cuda(count, devices=1)
    assert {name for name, waits in found.items() if waits} == {
        "item",
        "event",
        "stream",
        "device",
        "blocking copy",
        "mask",
    }


def fail(here: Here) -> list[str]:
    assert here.size == 1
    found = []
    for shape in (3 << 20, 1 << 30):
        fail_allocations(0)
        try:
            torch.zeros(shape, device="cuda")
        except torch.OutOfMemoryError as error:
            found.append(str(error).split(".")[0])
    found.append(str(torch.ones(2, device="cuda").sum().item()))
    fail_call(700)
    for _ in range(2):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


def test_errors_on_request() -> None:
    full, stays = "CUDA out of memory", "CUDA error: an illegal memory access was encountered"
    assert run_cuda(fail, devices=1) == [[full, full, "2.0", stays, stays]]


def replay(here: Here) -> list[float]:
    """Return the losses of training steps: without a graph, and as launches of one."""
    found = []
    for is_captured in (False, True):
        torch.manual_seed(here.size)
        layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
        model = torch.nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs, loss = torch.zeros(5, 6, device="cuda"), torch.zeros((), device="cuda")

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)  # noqa: B023 -- called in this turn only
            mean = model(inputs).square().mean()  # noqa: B023
            mean.backward()
            optimizer.step()  # noqa: B023
            loss.copy_(mean.detach())  # noqa: B023

        batches = [torch.randn(5, 6, generator=torch.Generator().manual_seed(turn)) for turn in range(6)]
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            for batch in batches[:2]:
                inputs.copy_(batch)
                step()
        torch.cuda.current_stream().wait_stream(side)
        if is_captured:
            with torch.cuda.graph(graph):
                step()
        for batch in batches[2:]:
            inputs.copy_(batch)
            (graph.replay if is_captured else step)()
            found.append(loss.item())
    return found


def test_a_captured_training_step() -> None:
    (losses,) = run_cuda(replay, devices=1)
    assert losses[:4] == losses[4:]
    assert len(set(losses)) == 4
