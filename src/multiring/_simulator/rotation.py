"""The messages of all ranks of a grid, from those of one rank.

On a grid without a root, all ranks take the same steps up to a rotation of each axis, as `price` assumes.
"""

import numpy as np

from multiring._schedule import Collective, Schedule

_WHOLE = frozenset({Collective.ALL_REDUCE, Collective.ALL_TO_ALL})


def is_rotated(schedule: Schedule) -> bool:
    """Return whether the steps of all ranks are those of one rank, rotated.

    The blocks of a reduce-scatter or an all-gather are in the order of ranks. On another order of positions, ranks cut
    their parts into different numbers of messages.
    """
    frame = schedule.frame
    is_cut_alike = schedule.collective in _WHOLE or frame.order == tuple(range(frame.ranks))
    return is_cut_alike and schedule.collective is not Collective.BROADCAST and not frame.joined


def offset_of(schedule: Schedule, axis: int, queue: int) -> int:
    """Return how far along `axis` a message to `queue` of its receiver travels."""
    return queue - axis * max(schedule.grid)


def peers_of(schedule: Schedule, axis: int, queue: int) -> list[int]:
    """Return the rank to which each rank sends its messages along `axis` that go to `queue` of their receivers."""
    # Positions count the first axis fastest; a numpy array counts its last axis fastest.
    grid = schedule.grid
    at = np.asarray(schedule.order).reshape(grid[::-1])
    moved = np.roll(at, -offset_of(schedule, axis, queue), axis=len(grid) - 1 - axis).ravel()
    peers: list[int] = moved[np.argsort(np.asarray(schedule.order))].tolist()
    return peers
