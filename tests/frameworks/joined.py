"""Ranks of a torch.distributed job in tests."""

import gc
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.wire.ranks import Here

PATIENCE = timedelta(seconds=100)  # of what must not end by it


def join_torch(here: Here, rendezvous: str, *, backend: str = "multiring", timeout: timedelta = PATIENCE) -> Any:
    """Return torch's group of all ranks, each of which computes with one thread and takes warnings for errors.

    Args:
        here: the rig's.
        rendezvous: a path where there is no file yet.
        backend: torch's name of it.
        timeout: the group's.
    """
    gc.freeze()  # as in plain.join
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=here.rank, world_size=here.size, timeout=timeout
    )
    return dist.group.WORLD
