"""Schedules for the pure tests: every entry of the table on small grids, in rank order and shuffled."""

import math
from collections.abc import Iterator

import numpy as np

from multiring._collectives import TABLE, build
from multiring._schedule import Accumulation, Collective, Counts, Frame, Moves, Schedule, Splits

GRIDS = [
    *[(p,) for p in (*range(1, 13), 16, 17)],
    *[(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (4, 3), (3, 5), (2, 8), (4, 4), (17, 2)],
    *[(2, 2, 2), (3, 1, 2), (2, 3, 2), (1, 3, 1), (4, 2, 3)],
    *[(2, 2, 2, 2), (3, 2, 1, 2), (2, 3, 2, 2), (1, 1, 1, 1), (2, 1, 1, 3)],
]


def frame_on(
    collective: Collective, grid: tuple[int, ...], *, shuffled: bool = False, shares: tuple[int, ...] = (1,)
) -> Frame:
    """Return a frame on `grid`. With three or more ranks, a broadcast's root is neither the first nor the last."""
    ranks = math.prod(grid)
    order = np.random.default_rng(ranks).permutation(ranks).tolist() if shuffled else range(ranks)
    root = ranks // 2 if collective is Collective.BROADCAST else 0
    return Frame(collective=collective, grid=grid, order=tuple(order), root=root, shares=shares)


def every_schedule(grid: tuple[int, ...]) -> Iterator[Schedule]:
    """Yield every entry of the table on `grid`: in rank order and shuffled, on one channel and on three uneven ones.

    Beyond 8 ranks, only the hardest case is used (shuffled, one channel), because the proof of all moves is slow.
    """
    for collective, algorithm in TABLE:
        yield build(algorithm, frame_on(collective, grid, shuffled=True))
        if math.prod(grid) <= 8:
            yield build(algorithm, frame_on(collective, grid))
            yield build(algorithm, frame_on(collective, grid, shares=(3, 1, 2)))
            yield build(algorithm, frame_on(collective, grid, shuffled=True, shares=(3, 1, 2)))
            yield build_wide(algorithm, frame_on(collective, grid))


def build_wide(algorithm: str, frame: Frame) -> Schedule:
    """Return the schedule with wide accumulation if the algorithm supports it, else with the arrays' own type."""
    is_ring = "ring" in algorithm and frame.collective in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER}
    return build(algorithm, frame, Accumulation.SAME if is_ring else Accumulation.WIDE)


def all_moves(schedule: Schedule) -> dict[int, Moves]:
    """Return the moves of all ranks."""
    return {rank: schedule.moves_of(rank) for rank in range(schedule.ranks)}


def counts_for(schedule: Schedule, block: int = 5) -> list[Counts]:
    """Return every rank's counts for blocks of different sizes: each block has about `block` elements."""
    p = schedule.ranks
    sizes = [block + (3 * rank) % 4 for rank in range(p)]
    if schedule.collective in {Collective.ALL_REDUCE, Collective.BROADCAST}:
        return [block * p] * p
    if schedule.collective is Collective.ALL_TO_ALL:
        pairs = [[(block + i + 2 * j) % 4 for j in range(p)] for i in range(p)]
        return [Splits(send=pairs[rank], receive=[pair[rank] for pair in pairs]) for rank in range(p)]
    return [sizes] * p
