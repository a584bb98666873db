"""Run a headline program as a job, kill the whole job, and read its run folder."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.jobs.job import ROOT, Job

from multiring.training.run_folder import METRICS, RESULT

RANK = ROOT / "benchmarks" / "evidence" / "headline" / "rank.py"
STEPS = "steps"  # the file that rank.py writes
PATIENCE_S = 1800.0
_GOING_ON = re.compile(r"going on from \S*step-(\d+)")


class ProgramJob(Job):
    """A program under `multiring run -n ranks` that waits at a moment to be killed.

    See rank.py for the moments.
    """

    def __init__(self, ranks: int, program: str, moment: str, data: Path, run: Path, words: Sequence[str]) -> None:
        self._start(["run", "-n", str(ranks)], RANK, program, moment, f"--data={data}", f"--run={run}", *words)

    @property
    def resumed_from(self) -> int:
        """The step of the checkpoint that the job resumed from, or 0 without a checkpoint."""
        found = _GOING_ON.search(self.output)
        return int(found[1]) if found else 0

    def end(self) -> None:
        """Wait until the job has ended successfully.

        Raises:
            RuntimeError: The exit code is not 0.
        """
        code = self.launcher.wait(PATIENCE_S)
        if code:
            raise RuntimeError(f"exit code {code}:\n{self.output[-4000:]}")

    def wait_until_step(self, run: Path, steps: int) -> None:
        """Wait until the job has logged `steps` more steps than it resumed from.

        Raises:
            RuntimeError: The job ended earlier, or the wait took longer than PATIENCE_S.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not (self.is_training and last_step(run) >= self.resumed_from + steps):
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run reached only step {last_step(run)}; output:\n{self.output[-4000:]}")
            time.sleep(0.01)

    @property
    def is_training(self) -> bool:
        """Whether this job has logged a step of its own."""
        return "step at step" in self.output

    def kill(self) -> None:
        """Kill the launcher and all ranks at once, and wait until they are gone."""
        for pid in [self.launcher.pid, *self.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # the process died with the launcher
                continue
        self.launcher.wait()
        while self.processes():
            time.sleep(0.01)


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics."""
    path = run / METRICS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_step(run: Path) -> int:
    """Return the last step that a run has logged, or 0."""
    return max((line["step"] for line in lines_of(run) if line["kind"] == "step"), default=0)


def steps_done(run: Path) -> list[int]:
    """Return the steps that a run completed, in order, including repeated steps."""
    text = (run / STEPS).read_text(encoding="utf-8")
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses_of(run: Path) -> list[float]:
    """Return the losses that a run has logged, step by step."""
    return [line["loss"] for line in lines_of(run) if line["kind"] == "step"]


def result_of(run: Path) -> dict[str, Any]:
    """Return the result file of a run."""
    found: dict[str, Any] = json.loads((run / RESULT).read_text(encoding="utf-8"))
    return found
