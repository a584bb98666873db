"""A rank of evidence_headline.py: one of the headline programs, with a moment at which it waits to be killed.

    python evidence_headline_rank.py FOLDER PROGRAM MOMENT WORDS...

MOMENT is `never`; `save:N`, within the N-th checkpoint, when its parts are written and not yet in their place; or
`accumulation:N`, within the N-th step, when half of its micro-batches went backward. There, and at its end with what
memory it took at the most, it leaves a word in FOLDER.
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
from examples.training import loop

from multiring.frontend.checkpoint import saving

PROGRAMS = {"imagenet": examples.imagenet.train.main, "climate": examples.climate.train.main}
PATIENCE_S = 600.0
STEPS = "steps"  # a file


def tell(folder: Path, **word: Any) -> None:
    """Say a word to who started this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(str(folder / "words"))
        line.send(json.dumps({"pid": os.getpid(), **word}).encode())


def wait_to_be_killed(folder: Path, moment: str) -> None:
    """Say that the moment has come, and wait."""
    tell(folder, at=moment)
    time.sleep(PATIENCE_S)
    raise TimeoutError(f"{moment}: nobody killed this rank within {PATIENCE_S:g} s")


def wait_in_save(folder: Path, chosen: int) -> None:
    """Wait within the save of that number, on the rank that puts it in its place."""
    finish, count = vars(saving)["finish"], itertools.count(1)

    @functools.wraps(finish)
    def waiting(*arguments: Any) -> None:
        if next(count) == chosen:
            wait_to_be_killed(folder, "save")
        finish(*arguments)

    vars(saving)["finish"] = waiting


def wait_in_accumulation(folder: Path, chosen: int) -> None:
    """Wait within the step of that number, half-way."""
    parts, count = loop._parts, itertools.count(1)  # noqa: SLF001 -- there is no other place between two backwards

    def waiting(batch: loop.Batch, samples: int, passes: int) -> Iterator[loop.Batch]:
        is_chosen = next(count) == chosen
        for number, part in enumerate(parts(batch, samples, passes)):
            if is_chosen and number == passes // 2:
                wait_to_be_killed(folder, "accumulation")
            yield part

    loop._parts = waiting  # noqa: SLF001


def note_steps() -> None:
    """Have rank 0 write down each step that ended, in the run's folder, at once: metrics come a step later."""
    step = loop.Run._step  # noqa: SLF001 -- what is counted is the work itself

    @functools.wraps(step)
    def noting(run: loop.Run, batch: loop.Batch) -> float:
        own = step(run, batch)
        if run.rank == 0:
            with (run.folder / STEPS).open("a", encoding="utf-8") as file:
                file.write(f"{run.progress.step + 1}\n")
        return own

    setattr(loop.Run, "_step", noting)  # noqa: B010 -- a method is not assigned to


def main() -> None:
    """Run the program."""
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
