"""What one rank of a job in a lab does for the evidence: python evidence_hosts_rank.py FOLDER TASK ...

As evidence_rank.py, whose words it speaks. Needs NumPy only.
"""

import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence_rank import join, tell

import multiring

_FAILING_COUNT = 1 << 18  # of float32: several moves are under way when something fails
_TELL_S = 0.25
_POLL_S = 0.02


def main() -> None:
    """Run the task."""
    folder, task, *arguments = sys.argv[1:]
    tasks: dict[str, Any] = {"join": join, "fail": fail, "work": work}
    tasks[task](Path(folder), *arguments)


def fail(folder: Path, stage: str, late_host: str) -> None:
    """Be at `stage` until an operation raises, and report what it raised.

    Ranks of `late_host` come to init only when told, so that the others are in it until then.
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
    """Reports what multiring warns of."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """Report a warning."""
        tell(self._folder, warned=record.getMessage(), host=socket.gethostname(), at_s=time.monotonic())


def work(folder: Path, size_bytes: str) -> None:
    """Sum buffers of a size until told to stop; rank 0 reports how many so far, and whether all were right."""
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
