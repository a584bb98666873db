"""Sets of ranks as runs: [start, stop, start, stop, ...], each without its stop, ascending, with gaps between them."""

from collections.abc import Iterable

Runs = list[int]


def add_run(runs: Runs, start: int, stop: int) -> None:
    """Add the ranks from `start` up to `stop`, none of which is before the last one in `runs`."""
    if runs and runs[-1] == start:
        runs[-1] = stop
    else:
        runs += (start, stop)


def add_runs(runs: Runs, more: Runs) -> None:
    """Add ranks none of which is before the last one in `runs`."""
    if more:
        add_run(runs, more[0], more[1])
        runs += more[2:]


def runs_of(ranks: Iterable[int]) -> Runs:
    """Return the runs of ascending ranks."""
    runs: Runs = []
    for rank in ranks:
        add_run(runs, rank, rank + 1)
    return runs


def ranks_in(runs: Runs) -> tuple[int, ...]:
    """Return all ranks, ascending."""
    ranges = (range(start, stop) for start, stop in zip(runs[::2], runs[1::2], strict=True))
    return tuple(rank for run in ranges for rank in run)
