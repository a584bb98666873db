"""What Caffe knows of the process: its place among the solvers."""


class Place:
    """Which of how many solvers this process has."""

    count = 1
    rank = 0
    is_multiprocess = False


def set_solver_count(count: int) -> None:
    Place.count = count


def set_solver_rank(rank: int) -> None:
    Place.rank = rank


def set_multiprocess(multiprocess: bool) -> None:  # noqa: FBT001 -- pycaffe's
    Place.is_multiprocess = multiprocess


def set_mode_cpu() -> None:
    """Do nothing: there is no other mode."""
