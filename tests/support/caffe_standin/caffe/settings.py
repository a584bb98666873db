"""The settings that Caffe keeps for each thread, such as solver count and rank.

As in Caffe, a setting applies only to the thread that makes it.
"""

import threading


class _Place(threading.local):
    count = 1
    rank = 0
    is_multiprocess = False


Place = _Place()


def set_solver_count(count: int) -> None:
    Place.count = count


def solver_count() -> int:
    return Place.count


def set_solver_rank(rank: int) -> None:
    Place.rank = rank


def solver_rank() -> int:
    return Place.rank


def set_multiprocess(multiprocess: bool) -> None:  # noqa: FBT001 -- pycaffe's signature
    Place.is_multiprocess = multiprocess


def set_mode_cpu() -> None:
    """Do nothing: the stand-in always computes on the CPU."""


def check_root_solver() -> None:
    """Raise an error unless the solver rank is 0. Caffe aborts the process instead."""
    assert Place.rank == 0, "Check failed: Caffe::root_solver()"
