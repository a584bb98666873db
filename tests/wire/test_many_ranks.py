"""More ranks than cores: they meet, sum, and keep descriptors to their neighbours on the grid only.

64 ranks, as processes of their own, are in benchmarks/evidence.py.
"""

import resource
from pathlib import Path

import numpy as np
import pytest
from tests.wire.ranks import Here, run_ranks

# epoll and what wakes it, the bell (shm) or the listener (tcp), what Python opened meanwhile, and the socket by which
# the process claims its rank.
OWN = 6


def join_and_sum(here: Here) -> tuple[int, tuple[int, ...]]:
    """Return how many descriptors this rank has more than before, and the grid."""
    before = descriptors()
    group = here.join()
    total = np.full(1000, here.rank, np.int64)
    group.all_reduce(total)
    assert (total == sum(range(here.size))).all()
    opened = descriptors() - before
    group.barrier()
    return opened, group.grid


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_descriptors_grow_with_the_grid(engine: str) -> None:
    most = {}
    for ranks in (4, 16, 20):
        by_rank = run_ranks(join_and_sum, ranks, engine=engine)
        most[ranks] = max(opened for opened, _ in by_rank)
        (grid,) = {grid for _, grid in by_rank}
        # A death is watched for on both sides along each axis; tcp talks to everybody on the lines.
        neighbours = sum(min(size - 1, 2) if engine == "shm" else size - 1 for size in grid)
        assert neighbours <= most[ranks] <= neighbours + OWN, f"{most[ranks]} for {neighbours} neighbours"
    if engine == "tcp":
        assert most[20] < most[16]  # 5 x 4 ranks have 7 others on their lines, 16 in a row 15


def swap_large_blocks(here: Here) -> float:
    """Return how many MiB of its own memory a rank has more after an all_to_all of 2 MiB between any two."""
    group = here.join()
    array = np.ones(here.size << 19, np.float32)
    swapped = group.all_to_all(array[: here.size << 4])  # what has to be there once is there
    group.barrier()
    before = own_memory_mib()
    swapped = group.all_to_all(array)
    group.barrier()
    after = own_memory_mib()
    assert (swapped == 1).all()
    return after - before


def own_memory_mib() -> float:
    """Return the resident memory that is nobody else's: what users get from a group lies in shared memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_what_links_keep_does_not_grow_with_them() -> None:
    # 8 MiB of buffers for payload, all links together; each link had 2 MiB of its own.
    kept = run_ranks(swap_large_blocks, 12, engine="tcp")
    assert max(kept) < 14, kept


# --- open files ---


def join_with_few_files(here: Here) -> int:
    """Return the soft limit after `init`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    here.join().barrier()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_init_raises_the_limit() -> None:
    assert min(run_ranks(join_with_few_files, 2)) > 1000
