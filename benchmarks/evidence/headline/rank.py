"""Run a rank of main.py: a headline program that waits to be killed.

    python rank.py FOLDER PROGRAM MOMENT WORDS...

MOMENT says where the program waits. `never` does not wait. `save:N` waits in the N-th checkpoint, after its parts were
written and before they are moved to their place. `accumulation:N` waits in the N-th step, after half of its
micro-batches ran backward. The rank sends a report to the socket in FOLDER when it waits. At its end, it sends another
report with its peak memory.
"""

import functools
import itertools
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import examples.climate.train
import examples.imagenet.train
from torch import Tensor

from multiring._frontend.checkpoint import saving
from multiring.training import loop
from multiring.training.task import Batch

PROGRAMS = {"imagenet": examples.imagenet.train.main, "climate": examples.climate.train.main}
PATIENCE_S = 600.0
STEPS = "steps"  # the name of the file with the completed steps


def tell(folder: Path, **word: Any) -> None:
    """Send a report to the parent process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(str(folder / "words"))
        line.send(json.dumps({"pid": os.getpid(), **word}).encode())


def wait_to_be_killed(folder: Path, moment: str) -> None:
    """Report that the moment has come, and wait for the kill."""
    tell(folder, at=moment)
    time.sleep(PATIENCE_S)
    raise TimeoutError(f"{moment}: nobody killed this rank within {PATIENCE_S:g} s")


def wait_in_save(folder: Path, chosen: int) -> None:
    """Wait in save number `chosen`, on the rank that moves the save to its place."""
    finish, count = vars(saving)["finish"], itertools.count(1)

    @functools.wraps(finish)
    def waiting(*arguments: Any) -> None:
        if next(count) == chosen:
            wait_to_be_killed(folder, "save")
        finish(*arguments)

    vars(saving)["finish"] = waiting


def wait_in_accumulation(folder: Path, chosen: int) -> None:
    """Wait half-way through the micro-batches of step number `chosen`."""
    parts, count = vars(loop)["micro_batches"], itertools.count(1)  # no public hook runs between two backwards

    def waiting(batch: Batch, samples: int, passes: int) -> Iterator[Batch]:
        is_chosen = next(count) == chosen
        for number, part in enumerate(parts(batch, samples, passes)):
            if is_chosen and number == passes // 2:
                wait_to_be_killed(folder, "accumulation")
            yield part

    vars(loop)["micro_batches"] = waiting


def note_steps() -> None:
    """Make rank 0 log each completed step at once in the run's folder.

    The metrics log a step one step later.
    """
    step = loop.TrainingRun._step  # noqa: SLF001 -- no public hook runs at each step

    @functools.wraps(step)
    def noting(run: loop.TrainingRun, batch: Batch) -> Tensor:
        own = step(run, batch)
        if run.rank == 0:
            with (run.folder / STEPS).open("a", encoding="utf-8") as file:
                file.write(f"{run.progress.step + 1}\n")
        return own

    setattr(loop.TrainingRun, "_step", noting)  # noqa: B010 -- mypy refuses an assignment to a method


def main() -> None:
    """Run the program, waiting at its moment; at its end, report the peak memory."""
    folder, program, moment, *words = sys.argv[1:]
    note_steps()
    kind, _, number = moment.partition(":")
    if kind != "never":
        {"save": wait_in_save, "accumulation": wait_in_accumulation}[kind](Path(folder), int(number))
    PROGRAMS[program](words)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tell(Path(folder), peak_gib=peak_kib / 2**20)


if __name__ == "__main__":
    main()
