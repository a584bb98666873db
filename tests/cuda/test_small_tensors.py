"""All-reduces of small device tensors: the copy to the host starts on another thread."""

import threading
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.ranks import Here

import multiring.torch as mt
from multiring._runtime.engines.pinned_memory import PinnedMemory
from multiring.errors import ArgumentError, CollectiveError, UnsupportedError
from multiring.torch.collectives.small_allreduce import MOST_BYTES, LateCopy
from multiring.torch.device_staging import DeviceStaging

Patch = pytest.MonkeyPatch
SMALL = MOST_BYTES // 4


def values(here: Here) -> int:
    """Return how many copies started late."""
    mt.init()
    device, begun = torch.device("cuda", torch.cuda.current_device()), []
    begin = LateCopy.begin

    def counted(self: LateCopy) -> Any:
        begun.append(threading.current_thread())
        return begin(self)

    with Patch.context() as patch:
        patch.setattr(LateCopy, "begin", counted)
        for number in range(40):
            x = torch.full((4, 5), number + here.rank, dtype=torch.int32, device=device)
            own = x.t() if number % 4 == 3 else x  # columns need a copy of their own
            if number % 2:
                handle = mt.allreduce_async_(own, name="same", op="sum")
            else:
                handle = mt.allreduce_async(own, op="sum")
            version = x._version
            del own
            if number % 8 == 0:
                del x
                torch.full((4, 5), -1, dtype=torch.int32, device=device)  # the memory, if it is free
            found = mt.synchronize(handle)
            assert found.unique().tolist() == [number * here.size + sum(range(here.size))], number
            if number % 2:
                assert x._version > version
        large = [torch.ones(SMALL + 1, device=device) for _ in range(4)]
        count = len(begun)
        for each in large:
            assert mt.synchronize(mt.allreduce_async(each, op="sum")).unique().tolist() == [here.size]
        assert len(begun) == count
        negative = torch.ones(3, dtype=torch.complex64, device=device).mul(2j).conj().imag  # a lazy negation
        assert negative.is_neg()
        for _ in range(2):
            assert mt.synchronize(mt.allreduce_async(negative, op="sum")).tolist() == [-2.0 * here.size] * 3
    return len(begun)


@pytest.mark.parametrize(("hosts", "devices"), [(1, 1), (1, 2), (2, 1)])
def test_values(hosts: int, devices: int) -> None:
    assert run_cuda(values, hosts=hosts, devices=devices) == [29] * (
        hosts * devices
    )  # 30 are in one piece, and the first is checked


def errors(here: Here) -> str:
    mt.init()
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(SMALL, device=device)
    for _ in range(2):
        mt.synchronize(mt.allreduce_async_(x, name="x", op="average"))

    def no_memory(*_arguments: Any) -> None:
        raise ArgumentError("rank 1: no shared memory left")

    with Patch.context() as patch:
        if here.rank == 1:
            patch.setattr(PinnedMemory, "take", no_memory)
        handle = mt.allreduce_async_(x, name="x", op="average")
        with pytest.raises(ArgumentError, match="same name"):
            mt.allreduce_async_(x, name="x", op="average")
        with pytest.raises((ArgumentError, CollectiveError)) as error:
            mt.synchronize(handle)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="capturing a graph"), torch.cuda.graph(graph):
        mt.allreduce_async_(x, name="x", op="average")
    for handle in [mt.allreduce_async_(x * 1, name="x", op="average"), mt.allreduce_async(x)]:
        assert mt.synchronize(handle).eq(1).all()
    return f"{type(error.value).__name__}: {error.value}"


def test_an_error_of_the_late_copy_is_raised_on_all_ranks() -> None:
    found = run_cuda(errors, devices=2)
    assert found[1] == "ArgumentError: rank 1: no shared memory left"
    assert "allreduce that failed with ArgumentError: rank 1: no shared memory left" in found[0]


def caller(here: Here) -> list[str]:
    """Return what the caller's thread does to the device in a call."""
    mt.init()
    assert here.size == 2
    device, done = torch.device("cuda", torch.cuda.current_device()), []
    x, own = torch.ones(256, device=device), threading.current_thread()
    for _ in range(3):
        mt.synchronize(mt.allreduce_async_(x, name="x", op="average"))

    def noting(name: str) -> Any:
        original = getattr(DeviceStaging, name)

        def method(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is own:
                done.append(name)
            return original(*arguments, **options)

        return method

    with Patch.context() as patch:
        for name in ("pinned_tensor", "all_to_host_behind", "all_to_device", "reached", "require_no_capture"):
            patch.setattr(DeviceStaging, name, noting(name))
        handle = mt.allreduce_async_(x, name="x", op="average")
        called = list(done)
    mt.synchronize(handle)
    return called


def test_the_callers_thread_only_records_an_event() -> None:
    assert run_cuda(caller, devices=2) == [["reached"]] * 2
