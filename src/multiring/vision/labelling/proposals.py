"""What a model proposes for pictures: the files of proposals, and the process that writes them.

A file has one line of JSON for each picture. It is only added to, so that a process that was killed goes on where it
stopped. A line that was not written to its end is left out, and the picture is proposed for again.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring.errors import StateError
from multiring.vision.labels import Label, from_json
from multiring.vision.project.scanning import RUNS

FOLDER = "proposals"  # in the folder of runs
_MODEL = "model.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a model proposes for a picture.

    Attributes:
        labels: the labels, the surest first.
        scores: the score of each, 0 to 1.
        confidence: how sure the model is of the whole answer, 0 to 1.
    """

    labels: tuple[Label, ...]
    scores: tuple[float, ...]
    confidence: float


def newest_model(folder: Path) -> str | None:
    """Return the name of the newest finished run of a project whose model sees pictures, or None."""
    found = []
    for path in (folder / RUNS).glob(f"*/{_MODEL}"):
        try:
            told = json.loads(path.read_text("utf-8"))
            if told.get("kind") != "act":  # such a model sees clips
                found.append((str(told.get("when", "")), path.parent.name))
        except (OSError, ValueError, AttributeError):
            continue  # a file that is no description of a model
    return max(found)[1] if found else None


def proposals_file(folder: Path, run: str) -> Path:
    """Return the file of the proposals of a run's model. A run that was trained again under its name has another."""
    try:
        digest = json.loads((folder / RUNS / run / _MODEL).read_text("utf-8"))["digests"]["weights"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"run {run!r} has no finished model: train one first") from error
    return folder / RUNS / FOLDER / f"{run}.{str(digest)[:16]}.jsonl"


def lines_of(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file of proposals."""
    for line in data.split(b"\n")[:-1]:
        try:
            told = json.loads(line)
        except ValueError:
            continue  # the end of a line that a killed process did not finish
        if isinstance(told, dict):
            yield told


class ProposalStore:
    """The proposals for a project, and the process that makes them. Several threads may use it.

    Attributes:
        folder: the project's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._file: Path | None = None
        self._run = ""
        self._read = 0
        self._found: dict[str, Proposal] = {}  # by the digest of the picture's file
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._problem = ""

    def start(self, run: str | None = None) -> None:
        """Start a process that proposes labels for the pictures without labels.

        Args:
            run: the name of the run whose model is used; None is the newest one.

        Raises:
            StateError: no run has a finished model.
        """
        chosen = run or newest_model(self.folder)
        if chosen is None or Path(chosen).name != chosen:
            raise StateError(
                "no model of pictures is finished yet: label some pictures and run `multiring vision train` first, of "
                "another kind than act"
            )
        file = proposals_file(self.folder, chosen)
        with self._lock:
            if self._is_running():
                return
            self._use(file, chosen)
            self._problem = ""
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- it is closed with the process
            self._process = subprocess.Popen(  # noqa: S603 -- our own program
                [sys.executable, "-m", "multiring.vision.labelling.proposing", str(self.folder), chosen, str(file)],
                stdin=subprocess.PIPE,  # it closes when this process ends, even by a kill, and so ends the other one
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )

    def _use(self, file: Path, run: str) -> None:
        if file != self._file:
            self._file, self._run, self._read, self._found = file, run, 0, {}

    def stop(self) -> None:
        """End the process, if one runs. What it has proposed stays."""
        with self._lock:
            process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._collect()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _collect(self) -> None:
        with self._lock:
            process = self._process
            if process is None or process.poll() is None:
                return
            self._errors.seek(0)
            lines = self._errors.read()[-4000:].decode("utf-8", "replace").strip().split("\n")
            self._errors.close()
            if process.returncode > 0:
                self._problem = lines[-1] or f"the process ended with {process.returncode}"
            if process.stdin is not None:
                process.stdin.close()
            self._process = None

    def update(self) -> None:
        """Read what was proposed since the last call."""
        self._collect()
        with self._lock:
            if self._file is None:
                run = newest_model(self.folder)
                if run is None:
                    return
                self._use(proposals_file(self.folder, run), run)
            assert self._file is not None  # noqa: S101 -- set above
            try:
                with self._file.open("rb") as opened:
                    opened.seek(self._read)
                    data = opened.read()
            except FileNotFoundError:
                return
            end = data.rfind(b"\n") + 1
            for told in lines_of(data[:end]):
                labels = tuple(from_json(each) for each in told["labels"])
                proposal = Proposal(labels=labels, scores=tuple(told["scores"]), confidence=float(told["confidence"]))
                self._found[told["digest"]] = proposal
            self._read += end

    def status(self) -> dict[str, Any]:
        """Return what the page shows: the run, whether a process runs, the number of pictures, and a problem or ""."""
        with self._lock:
            return {
                "run": self._run,
                "newest": newest_model(self.folder) or "",
                "is_running": self._is_running(),
                "pictures": len(self._found),
                "problem": self._problem,
            }

    def confidences(self) -> dict[str, float]:
        """Return how sure the model is of each picture, by the digest of the picture's file."""
        with self._lock:
            return {digest: proposal.confidence for digest, proposal in self._found.items()}

    def proposal(self, digest: str) -> Proposal | None:
        """Return what is proposed for the picture whose file has a digest, or None."""
        with self._lock:
            return self._found.get(digest)
