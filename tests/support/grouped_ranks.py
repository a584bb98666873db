"""Helpers of backend tests: join a torch.distributed job, and compare tensors."""

import gc
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives
from tests.support.ranks import Here
from torch import Tensor

PATIENCE = timedelta(seconds=100)
dist: Any = torch.distributed  # torch types only parts of it
functional: Any = torch.distributed._functional_collectives


def enter(here: Here, place: str, **options: Any) -> Any:
    """Return torch's group of all ranks, which meet through a store in file `place`.

    Warnings become errors, and each rank computes with one thread.
    """
    gc.freeze()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(place, here.size)
    dist.init_process_group("multiring", store=store, rank=here.rank, world_size=here.size, timeout=PATIENCE, **options)
    return dist.group.WORLD


def as_bits(tensor: Tensor) -> Tensor:
    """Return `tensor` in a form that `torch.equal` can compare, whatever its type."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def expect(found: Tensor, wanted: Tensor) -> None:
    """Assert that two tensors have the same type and the same bits."""
    assert found.dtype is wanted.dtype
    assert torch.equal(as_bits(found), as_bits(wanted)), f"{found} is not {wanted}"
