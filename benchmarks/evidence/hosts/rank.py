"""Run one rank of a lab job for the evidence.

    python rank.py FOLDER TASK ...

The rank sends its reports in the same way as benchmarks/evidence/jobs/rank.py. It needs only NumPy.
"""

import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence.jobs.rank import join, tell

import multiring

_FAILING_COUNT = 1 << 18  # in float32 elements; large enough to have several transfers in flight at a failure
_TELL_S = 0.25
_POLL_S = 0.02


def main() -> None:
    """Run the task."""
    folder, task, *arguments = sys.argv[1:]
    tasks: dict[str, Any] = {"join": join, "fail": fail, "work": work}
    tasks[task](Path(folder), *arguments)


def fail(folder: Path, stage: str, late_host: str) -> None:
    """Stay at `stage` until an operation raises, and report the error.

    The ranks of `late_host` enter init only when the file `go` exists, so the others wait in init until then.
    """
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    tell(folder, **here, at="start")
    try:
        while late_host == here["host"] and not (folder / "go").exists():
            time.sleep(_POLL_S)
        group = multiring.init()
        array = np.ones(_FAILING_COUNT, np.float32)
        group.barrier()
        tell(folder, **here, at="work")
        while True:
            if stage == "barrier":
                group.barrier()
            else:
                group.all_reduce(array, "average")
    except multiring.errors.MultiringError as error:
        tell(folder, **here, raised=type(error).__name__, text=str(error), at_s=time.monotonic())
        raise SystemExit(1) from None


class Teller(logging.Handler):
    """Reports multiring's warnings to the parent process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """Report a warning."""
        tell(self._folder, warned=record.getMessage(), host=socket.gethostname(), at_s=time.monotonic())


def work(folder: Path, size_bytes: str) -> None:
    """Sum buffers of a size until the parent stops the job.

    Rank 0 reports the number of sums so far, and whether all were right.
    """
    logging.getLogger("multiring").addHandler(Teller(folder))
    group = multiring.init()
    array = group.allocate(int(size_bytes) // 4, "float32")
    want, right = group.size * (group.size + 1) / 2, True
    going, turns, told_s = np.ones(1), 0, 0.0
    while going[0]:
        array[...] = group.rank + 1
        group.all_reduce(array)
        right &= bool((array == want).all())
        turns += 1
        if group.rank == 0 and time.monotonic() - told_s > _TELL_S:
            told_s = time.monotonic()
            tell(folder, turns=turns, right=right, at_s=told_s)
        going[0] = group.rank != 0 or not (folder / "stop").exists()
        group.all_reduce(going, "min")
    tell(folder, rank=group.rank, done=turns, right=right)


if __name__ == "__main__":
    main()
