"""Record the runs of an experiment, so that it can continue after an interruption."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class OutOfTimeError(Exception):
    """Raised when the minutes of this piece are over; the next piece continues."""


class Record:
    """The recorded runs of an experiment, in a file with one JSON object per line."""

    def __init__(self, path: Path, minutes: float) -> None:
        """Read the recorded runs.

        Args:
            path: The file, which need not exist.
            minutes: The time after which no further run starts.
        """
        self._path = path
        self._ends = time.monotonic() + 60 * minutes
        self._runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._runs[entry["run"]] = entry

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `work`, from this piece or an earlier one.

        Raises:
            OutOfTimeError: The run is not recorded, and the minutes are over.
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
        """The seconds that all runs took."""
        return float(sum(each["seconds"] for each in self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)
