"""More ranks than cores: they meet, sum, and keep descriptors to their neighbours on the grid only.

64 ranks, as processes of their own, are in benchmarks/evidence.py.
"""

from pathlib import Path

import numpy as np
import pytest
from tests.wire.ranks import Here, run_ranks

# epoll and what wakes it, the bell (shm) or the listener (tcp), and what Python opened meanwhile.
OWN = 5


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
