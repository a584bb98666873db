"""What Caffe knows of a thread: its place among the solvers. As in Caffe, each thread has its own, as set there."""

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


def set_multiprocess(multiprocess: bool) -> None:  # noqa: FBT001 -- pycaffe's
    Place.is_multiprocess = multiprocess


def set_mode_cpu() -> None:
    """Do nothing: there is no other mode."""


def check_root_solver() -> None:
    """Fail as Caffe does on other solvers than the first; the real one aborts the process."""
    assert Place.rank == 0, "Check failed: Caffe::root_solver()"
