"""The steps of all ranks of a grid, from those of one rank.

On a grid without a root, all ranks take the same steps up to a rotation of each axis, as `price` assumes.
"""

import numpy as np

from multiring._schedule import Collective, Schedule
from multiring._schedule.price import representative
from multiring._schedule.timing import StepMessage, TimedStep

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


def rotated_programs(schedule: Schedule) -> list[tuple[TimedStep, ...]]:
    """Return the timed steps of every rank of a schedule that `is_rotated`; queues are those of `representative`."""
    steps, grid = representative(schedule), schedule.grid
    routes = {(message.axis, message.queue) for step in steps for message in step.sends}
    at = np.asarray(schedule.order).reshape(grid[::-1])
    place = np.argsort(np.asarray(schedule.order))
    # Positions count the first axis fastest; a numpy array counts its last axis fastest.
    peers = {
        (axis, queue): np.roll(at, -offset_of(schedule, axis, queue), axis=len(grid) - 1 - axis).ravel()[place].tolist()
        for axis, queue in routes
    }
    programs = []
    for rank in range(schedule.ranks):
        own = [
            step._replace(
                sends=tuple(
                    StepMessage(axis, to, queue, to)
                    for axis, _, queue, _ in step.sends
                    for to in (peers[axis, queue][rank],)
                )
            )
            if step.sends
            else step
            for step in steps
        ]
        programs.append(tuple(own))
    return programs
