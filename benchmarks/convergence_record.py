"""Runs that are recorded one by one, so that an experiment goes on where it was cut off."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class OutOfTimeError(Exception):
    """The piece's minutes are over; the next one goes on."""


class Record:
    """The runs of one experiment, in a file of one JSON object a line."""

    def __init__(self, path: Path, minutes: float) -> None:
        """Read what is there.

        Args:
            path: of the file, which need not exist.
            minutes: after which no further run begins.
        """
        self._path = path
        self._ends = time.monotonic() + 60 * minutes
        self._runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._runs[entry["run"]] = entry

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `work` found, now or in an earlier piece.

        Raises:
            OutOfTimeError: it has not run, and the minutes are over.
        """
        if name not in self._runs:
            if time.monotonic() > self._ends:
                raise OutOfTimeError
            began = time.monotonic()
            found = work()
            entry = {"run": name, **found, "seconds": round(time.monotonic() - began, 2)}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self._runs[name] = entry
        return self._runs[name]

    @property
    def seconds(self) -> float:
        """How long all runs took."""
        return float(sum(each["seconds"] for each in self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)
