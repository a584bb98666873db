"""Jobs with more ranks than cores join and sum. Their descriptors grow only with the neighbours on the grid.

benchmarks/evidence/jobs/main.py runs 64 ranks as separate processes.
"""

import resource
from pathlib import Path

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

# Descriptors besides those of neighbours: epoll, its wake-up, the doorbell (shm) or the listener (tcp), files that
# Python opened, and the socket by which the process claims its rank.
OWN = 6


def join_and_sum(here: Here) -> tuple[int, tuple[int, ...]]:
    """Return the number of descriptors that joining opened on this rank, and the grid."""
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
        # Ranks watch both neighbours along each axis for their death; tcp connects to all ranks on the axis.
        neighbours = sum(min(size - 1, 2) if engine == "shm" else size - 1 for size in grid)
        assert neighbours <= most[ranks] <= neighbours + OWN, f"{most[ranks]} descriptors for {neighbours} neighbours"
    if engine == "tcp":
        assert most[20] < most[16]  # 5 x 4 ranks have 7 peers on their axes, 16 ranks in a row have 15


def swap_large_blocks(here: Here) -> float:
    """Return by how many MiB this rank's own memory grows in an all_to_all of 2 MiB between any two ranks."""
    group = here.join()
    array = np.ones(here.size << 19, np.float32)
    swapped = group.all_to_all(array[: here.size << 4])  # a first call allocates everything that is allocated once
    group.barrier()
    before = own_memory_mib()
    swapped = group.all_to_all(array)
    group.barrier()
    after = own_memory_mib()
    assert (swapped == 1).all()
    return after - before


def own_memory_mib() -> float:
    """Return the anonymous resident memory. It excludes arrays from a group, which lie in shared memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_what_links_keep_does_not_grow_with_them() -> None:
    # All links together have 8 MiB of payload buffers. Before, each link had 2 MiB of its own.
    kept = run_ranks(swap_large_blocks, 12, engine="tcp")
    assert max(kept) < 14, kept


# --- open files ---


def join_with_few_files(here: Here) -> int:
    """Join with a low limit of open files; return the soft limit after `init`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    here.join().barrier()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_init_raises_the_limit() -> None:
    assert min(run_ranks(join_with_few_files, 2)) > 1000
