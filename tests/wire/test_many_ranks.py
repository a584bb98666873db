"""More ranks than cores: they meet, sum, and keep descriptors to their neighbours only.

64 ranks, as processes of their own, are in benchmarks/evidence.py.
"""

from pathlib import Path

import numpy as np
import pytest
from tests.wire.ranks import Here, run_ranks


def join_and_sum(here: Here) -> tuple[int, tuple[int, ...]]:
    before = descriptors()
    group = here.join()
    total = np.full(1000, here.rank, np.int64)
    group.all_reduce(total)
    assert (total == sum(range(here.size))).all()
    group.barrier()
    return descriptors() - before, group.grid


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_descriptors_grow_with_the_grid(engine: str) -> None:
    opened = {}
    for ranks in (4, 16, 20):
        by_rank = run_ranks(join_and_sum, ranks, engine=engine)
        opened[ranks] = max(count for count, _ in by_rank)
        (grid,) = {grid for _, grid in by_rank}
        neighbours = sum(size - 1 for size in grid)
        # Besides neighbours: epoll, its waker, bells and listeners.
        assert opened[ranks] <= neighbours + 8, f"{opened[ranks]} descriptors for {neighbours} neighbours"
    assert opened[20] < opened[16]  # 5 x 4 has 7 neighbours, 16 in a row have 15
