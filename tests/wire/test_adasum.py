"""Adasum of every rank's arrays follows the formula and gives the same bits on each rank, for any number of ranks."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring._frontend.adasum import adasum
from multiring._frontend.adasum_reduction import start_adasum
from multiring._runtime.arrays import numpy_dtype
from multiring.errors import ArgumentError, MismatchError

Array = NDArray[Any]
SHAPES = ((7, 3), (), (1000,), (0,), (5, 1))
BOUNDS = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}


def arrays_of(rank: int, dtype: str, seed: int) -> list[Array]:
    generator = np.random.default_rng([rank, seed])
    return [np.array(generator.normal(size=shape) * 3.0**rank).astype(numpy_dtype(dtype)) for shape in SHAPES]


def check(group: Group, found: list[Array], dtype: str, seed: int) -> None:
    """Check each array against the formula as a vector of its own, and its bits against rank 0's."""
    by_rank = [arrays_of(rank, dtype, seed) for rank in range(group.size)]
    for index, array in enumerate(found):
        wanted = adasum([arrays[index].reshape(-1) for arrays in by_rank]).astype(np.float64)
        error = np.linalg.norm(array.reshape(-1).astype(np.float64) - wanted)
        assert error <= BOUNDS[dtype] * np.linalg.norm(wanted), (dtype, index)
        bits = array.reshape(-1).view(np.uint8).copy()
        group.broadcast(bits)
        assert bits.tobytes() == array.tobytes()


@pytest.mark.parametrize(("ranks", "engine"), [(1, "shm"), (2, "shm"), (3, "shm"), (4, "shm"), (5, "shm"), (3, "tcp")])
def test_the_formula_at_any_number_of_ranks(ranks: int, engine: str) -> None:
    run_ranks(work_out, ranks, engine=engine)


def work_out(here: Here) -> None:
    group = here.join()
    for dtype in BOUNDS:
        # Several operations are in flight at once, with another kind of operation in between.
        flying = [arrays_of(here.rank, dtype, seed) for seed in range(3)]
        ones = np.ones(3)
        handles = [start_adasum(group, flying[0]), start_adasum(group, flying[1])]
        handles += [group.all_reduce_async(ones), start_adasum(group, flying[2], label="the third")]
        for handle in reversed(handles):
            handle.wait()
        assert ones.tolist() == [here.size] * 3
        for seed, found in enumerate(flying):
            check(group, found, dtype, seed)
    start_adasum(group, []).wait()
    half = group.subgroup(range(here.size - here.size // 2))
    if half is not None:
        found = arrays_of(half.rank, "float32", 9)
        start_adasum(half, found).wait()
        check(half, found, "float32", 9)


def test_ranks_that_differ() -> None:
    run_ranks(differ, 3)


def differ(here: Here) -> None:
    group = here.join()
    odd = here.rank == 1
    for mine, text in (
        (np.ones(3 if odd else 2), r"rank 1: .*Adasum of shapes \(3,\); ranks 0, 2: .*Adasum of shapes \(2,\)"),
        (np.ones(2, np.float32 if odd else np.float64), "rank 1: all_to_all of float32 rows"),
    ):
        before = mine.copy()
        with pytest.raises(MismatchError, match=text):
            start_adasum(group, [mine]).wait()
        assert np.array_equal(mine, before)
        found = arrays_of(here.rank, "float32", 1)
        start_adasum(group, found).wait()
        check(group, found, "float32", 1)
    with pytest.raises(ArgumentError, match="Adasum of float32, float64 in one call: want one type"):
        start_adasum(group, [np.ones(1), np.ones(1, np.float32)])
    with pytest.raises(ArgumentError, match="Adasum of int64: want one of"):
        start_adasum(group, [np.ones(1, np.int64)])
    group.barrier()
