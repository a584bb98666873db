"""Measure how soon ranks in Keras' `fit` detect a failure and exit.

    python benchmarks/evidence/jobs/fit.py [--repeats 3]

The failures occur in `fit` and in tf.function. The program starts the ranks itself, because a launcher would end the
other ranks. The exit code is 1 if a rank detects the failure later than TOLD_S (for Ctrl-C: INTERRUPTED_S). It is also
1 if a rank still runs ENDED_S after that.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import the tests' programs

TOLD_S, INTERRUPTED_S, ENDED_S = 5.0, 1.0, 5.0
PATIENCE_S = 120.0
KINDS = ("with_an_exception", "with_a_lost_rank", "interrupted", "in_a_function")
_READY = ".ready"  # the suffix of the file that marks a job in training


class Here:
    """A stand-in for the tests' rig, as the test programs need it."""

    def __init__(self, rank: int, at_work: str) -> None:
        self.rank = rank
        self._at_work = at_work

    def reach(self, stage: str) -> None:
        """Create the file that lets the parent kill a rank."""
        del stage
        if self.rank == 1:
            Path(self._at_work).touch()


def worker(kind: str, over: str) -> None:
    """Run one rank; print when, and after how many seconds, it detected the failure."""
    programs = importlib.import_module("tests.support.conforming.in_fit")
    rank = int(os.environ["MULTIRING_RANK"])  # noqa: TID251 -- set by main
    told_s = programs.KINDS[kind](Here(rank, over + _READY), over)
    print("TOLD " + json.dumps([told_s, time.monotonic()]), flush=True)


def ran(backend: str, kind: str, ranks: int, number: int) -> tuple[float, float]:
    """Run a job; return two times in seconds.

    The first is the time until the last rank detected the failure. The second is the time from there until all
    processes ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        over = f"{folder}/over"
        place = f"@multiring-fit-{os.getpid()}-{number}"
        job = {"MULTIRING_SIZE": str(ranks), "MULTIRING_RENDEZVOUS": place, "MULTIRING_SECRET": place}
        quiet = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(  # noqa: S603 -- this file
                [sys.executable, __file__, "--worker", kind, "--over", over],
                env={**os.environ, **job, **quiet, "MULTIRING_RANK": str(rank)},  # noqa: TID251 -- for children
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        if kind == "with_a_lost_rank":
            until = time.monotonic() + PATIENCE_S
            while not Path(over + _READY).exists() and time.monotonic() < until:
                time.sleep(0.02)
            processes[1].send_signal(signal.SIGKILL)
        told: list[Any] = []
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=PATIENCE_S)
            lines = [line for line in output.splitlines() if line.startswith("TOLD ")]
            if rank != 1 and (process.returncode or not lines):
                raise SystemExit(f"{backend}, {kind}: rank {rank} ended with {process.returncode}:\n{output}")
            told += [json.loads(line[5:]) for line in lines]
        return max(told_s for told_s, _ in told), time.monotonic() - max(when for _, when in told)


def main() -> None:
    """Run all kinds; exit with 1 if a rank detected the failure late or hung."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker")
    parser.add_argument("--over", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backends", default="tensorflow,torch,jax")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.over)
        return
    missed, number = False, 0
    for backend in options.backends.split(","):
        for kind in KINDS:
            if kind == "in_a_function" and backend != "tensorflow":
                continue
            found = []
            for _ in range(options.repeats):
                number += 1
                found.append(ran(backend, kind, 2 if kind == "interrupted" else 3, number))
            told_s, ended_s = (max(each) for each in zip(*found, strict=True))
            floor = INTERRUPTED_S if kind == "interrupted" else TOLD_S
            missed = missed or told_s > floor or ended_s > ENDED_S
            print(
                f"Keras on {backend}, {kind}: told after {told_s:.2f} s at most (floor {floor}), all processes ended "
                f"{ended_s:.2f} s later (floor {ENDED_S}); {options.repeats} runs",
                flush=True,
            )
    raise SystemExit(int(missed))


if __name__ == "__main__":
    main()
