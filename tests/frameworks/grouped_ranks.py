"""Ranks that join torch.distributed's backend "multiring", and what they compare with."""

import gc
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives
from tests.wire.ranks import Here
from torch import Tensor

PATIENCE = timedelta(seconds=50)
dist: Any = torch.distributed  # not all of it has types
functional: Any = torch.distributed._functional_collectives


def enter(here: Here, place: str, **options: Any) -> Any:
    """Return torch's group of all ranks, which meet by a store in the file `place`; see plain.py."""
    gc.freeze()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(place, here.size)
    dist.init_process_group("multiring", store=store, rank=here.rank, world_size=here.size, timeout=PATIENCE, **options)
    return dist.group.WORLD


def as_bits(tensor: Tensor) -> Tensor:
    """Return `tensor` so that `torch.equal` compares it whatever its type."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def expect(found: Tensor, wanted: Tensor) -> None:
    """Assert that two tensors are the same bits."""
    assert found.dtype is wanted.dtype
    assert torch.equal(as_bits(found), as_bits(wanted)), f"{found} is not {wanted}"
