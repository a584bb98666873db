"""The rank whose samples this process loads, and the number of ranks. Loaders ask when an iteration begins."""

import os
from functools import cache

from multiring._frontend.lifecycle import rank, size
from multiring._runtime import is_initialized

Place = tuple[int, int]


class _Known:
    """Stores the rank of the process at its latest fork, for the forked child."""

    def __init__(self) -> None:
        self.process, self.place = os.getpid(), (0, 1)

    def note(self) -> None:
        """Record this process's rank, for a child that is about to be forked."""
        self.place = job_place()
        self.process = os.getpid()


@cache
def _known() -> _Known:
    made = _Known()
    os.register_at_fork(before=made.note)
    return made


def job_place() -> Place:
    """Return this process's rank and the number of ranks; (0, 1) outside a job.

    A forked child, such as a worker of torch's DataLoader, is not in a job itself. It gets the values of the process
    that forked it.
    """
    known = _known()
    if is_initialized():
        return rank(), size()
    return known.place if known.process != os.getpid() else (0, 1)
