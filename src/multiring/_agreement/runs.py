"""Sets of ranks as runs [start, stop, start, stop, ...].

The runs are ascending half-open ranges with gaps between them.
"""

from collections.abc import Iterable

Runs = list[int]


def add_run(runs: Runs, start: int, stop: int) -> None:
    """Add the ranks from `start` to `stop` - 1.

    `start` must not be below the end of the last run.
    """
    if runs and runs[-1] == start:
        runs[-1] = stop
    else:
        runs += (start, stop)


def add_runs(runs: Runs, more: Runs) -> None:
    """Add the ranks of `more`.

    These ranks must not be below the end of the last run in `runs`.
    """
    if more:
        add_run(runs, more[0], more[1])
        runs += more[2:]


def runs_of(ranks: Iterable[int]) -> Runs:
    """Return the runs of `ranks`, which must be ascending."""
    runs: Runs = []
    for rank in ranks:
        add_run(runs, rank, rank + 1)
    return runs


def ranks_in(runs: Runs) -> tuple[int, ...]:
    """Return all ranks of the runs, in ascending order."""
    ranges = (range(start, stop) for start, stop in zip(runs[::2], runs[1::2], strict=True))
    return tuple(rank for run in ranges for rank in run)
