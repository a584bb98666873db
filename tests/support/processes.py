"""Make the ranks of a test a torch.distributed process group over multiring."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.plain import join
from tests.support.ranks import Here

import multiring


@contextlib.contextmanager
def process_group(here: Here, store: Path, backend: str = "multiring") -> Iterator[multiring.Group]:
    """Join the job, and make its ranks the default process group.

    The ranks meet at the file `store`, which must not exist yet.
    """
    group = join(here)
    made = dist.FileStore(str(store), here.size)  # type: ignore[attr-defined] # torch defines it
    dist.init_process_group(backend, store=made, rank=here.rank, world_size=here.size)
    yield group
    dist.destroy_process_group()


def in_arena(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` lies in memory that the host's ranks share.

    The answer comes from /proc/self/maps.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, rest = line.partition(" ")
        start, end = (int(word, 16) for word in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return rest.startswith("rw-s") and "memfd:multiring" in rest
    return False
