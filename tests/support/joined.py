"""How ranks of tests join a torch.distributed job."""

import gc
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks import Here

PATIENCE = timedelta(seconds=100)  # the time-out of jobs that must not time out


def join_torch(here: Here, rendezvous: str, *, backend: str = "multiring", timeout: timedelta = PATIENCE) -> Any:
    """Return torch's group of all ranks; warnings become errors on each rank.

    Args:
        here: the rank's place in the test job.
        rendezvous: a path at which no file exists; the ranks meet there.
        backend: the backend's name in torch.
        timeout: the group's time-out.
    """
    gc.freeze()  # for the same reason as in plain.join
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=here.rank, world_size=here.size, timeout=timeout
    )
    return dist.group.WORLD
