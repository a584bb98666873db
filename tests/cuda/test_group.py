"""Group.on_device with torch's tensors: in both directions by DLPack, in the order of torch's streams."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from tests.standin.torch_devices import host_waits
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.ranks import Here

from multiring import Group
from multiring.errors import ArgumentError, CollectiveError, MismatchError, UnsupportedError

SLEEP = 20_000_000  # cycles


def order_streams(group: Any, rank: int) -> None:
    size, side = group.size, torch.cuda.Stream()
    for turn in range(6):
        stream = side if turn % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            tensor = torch.full(
                (1000,), rank + 1.0, device="cuda", dtype=torch.bfloat16 if turn == 5 else torch.float32
            )
            waits = host_waits()
            group.all_reduce_async(tensor).order(stream.cuda_stream)
            doubled = tensor * 2
            if turn == 4:
                assert host_waits() == waits  # the host has not waited for the device
            del tensor
            assert (doubled.cpu() == size * (size + 1)).all(), turn


def pass_arrays_to_torch(group: Any, rank: int) -> None:
    device = torch.cuda.current_device()
    for kind in ("float32", "int64", "bool", "bfloat16", "uint8", "float16"):
        own = group.allocate((3, 4), kind).put(np.full((3, 4), rank == 0))
        tensor = torch.utils.dlpack.from_dlpack(own)
        assert (tensor.device.index, str(tensor.dtype), tensor.shape) == (device, f"torch.{kind}", (3, 4))
        group.broadcast(tensor)
        assert (tensor.cpu() == 1).all()
        assert (own.get() == 1).all()


def keep_memory(group: Any) -> None:
    """Memory is not used again while a tensor of it lives, or a kernel on it runs."""
    own = group.allocate(1000, "float32").put(np.full(1000, 5.0))
    torch.cuda._sleep(SLEEP)
    tensor = torch.utils.dlpack.from_dlpack(own)
    address = own.address
    del own
    gc.collect()
    other = group.allocate(1000, "float32")
    assert other.address != address
    torch.cuda._sleep(SLEEP)
    found = tensor + 1
    del tensor
    later = group.allocate(1000, "float32").put(np.zeros(1000))
    assert later.address == address
    assert (found.cpu() == 6).all()
    assert (later.get() == 0).all()


def refuse(host: Group, group: Any, rank: int) -> None:
    device = torch.cuda.current_device()
    with pytest.raises(ArgumentError, match=r"does not expose its memory: .*gradient"):
        group.all_reduce(torch.ones(3, device="cuda", requires_grad=True))
    with pytest.raises(ArgumentError, match="is not row-major"):
        group.all_reduce(torch.ones(3, 4, device="cuda").T)
    with pytest.raises(ArgumentError, match="Tensor is not in device memory"):
        group.all_reduce(torch.ones(3))
    other = f"cuda:{(device + 1) % 2}"
    with pytest.raises(ArgumentError, match=f"is on device {(device + 1) % 2}; want an array on device {device}"):
        group.all_reduce(torch.ones(3, device=other))
    with pytest.raises(ArgumentError if rank == 0 else MismatchError, match="is not in device memory"):
        group.all_reduce(torch.ones(3, device="cpu" if rank == 0 else "cuda"))
    group.all_reduce(tensor := torch.ones(3, device="cuda"))
    assert (tensor.cpu() == group.size).all()
    with pytest.raises(ArgumentError, match="has its arrays on devices already"):
        group.on_device(0)
    for wrong, error, text in (
        ("mps", UnsupportedError, "device='mps' is not served; want a CUDA device"),
        ("cuda", ArgumentError, "device='cuda': want 'cuda:N' or N"),
        (99, ArgumentError, "device=99: want 0 to 1"),
    ):
        with pytest.raises(error if rank == 0 else CollectiveError, match=text):
            host.on_device(wrong if rank == 0 else f"cuda:{device}")


def exchange(here: Here) -> None:
    host = here.join()
    group = host.on_device(f"cuda:{torch.cuda.current_device()}")
    order_streams(group, here.rank)
    pass_arrays_to_torch(group, here.rank)
    keep_memory(group)
    refuse(host, group, here.rank)


@pytest.mark.parametrize(("hosts", "devices"), [(1, 2), (2, 2)])
def test_torch_and_a_group_share_device_memory(hosts: int, devices: int) -> None:
    run_cuda(exchange, hosts=hosts, devices=devices, standin={"delay_us": 1000})
