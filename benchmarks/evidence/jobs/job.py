"""Run a job under `multiring run`, watch it, and search for its remains."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from multiring._bench.variants import AS_IT_IS, VARIANTS
from multiring._settings import inherited_environment
from multiring.lab import ask_lab

ROOT = Path(__file__).parents[3]
RANK = ROOT / "benchmarks" / "evidence" / "jobs" / "rank.py"
MARK = "EVIDENCE_JOB"  # an environment variable that every process of a job inherits

Word = dict[str, Any]
_Job = TypeVar("_Job", bound="Job")


class Job:
    """A job of `multiring run -n ranks -- python rank.py task ...`.

    The ranks send reports in JSON.
    """

    def __init__(self, ranks: int, task: str, *arguments: object, **settings: object) -> None:
        self._start(["run", "-n", str(ranks)], RANK, task, *arguments, **settings)

    def _start(self, starter: Sequence[str], rank: Path, task: str, *arguments: object, **settings: object) -> None:
        """Start `task` of the script `rank` with `multiring STARTER...`.

        The `settings` become environment variables.
        """
        self._mark = secrets.token_hex(8)
        self._folder = tempfile.TemporaryDirectory(prefix="evidence-")
        self.words = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.words.bind(f"{self._folder.name}/words")
        self.heard: list[Word] = []
        self.before = traces()
        environment = {
            **inherited_environment(),
            **{name.upper(): str(value) for name, value in settings.items()},
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        }
        command = [sys.executable, str(rank), self._folder.name, task, *map(str, arguments)]
        self._output = Path(self._folder.name) / "output"
        self.start = time.monotonic()
        with self._output.open("wb") as output:
            self.launcher = subprocess.Popen(  # noqa: S603 -- our own
                [sys.executable, "-m", "multiring", *starter, "--", *command],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def __enter__(self: _Job) -> _Job:  # noqa: PYI019 -- Self came with Python 3.11
        return self

    def __exit__(self, *failure: object) -> None:
        self.launcher.kill()
        self.launcher.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.words.close()
        self._folder.cleanup()

    @property
    def output(self) -> str:
        """The output of the launcher and its ranks so far."""
        return self._output.read_text(errors="replace")

    def tell(self, word: str) -> None:
        """Create the file `word` in the job's folder, as a signal for the ranks."""
        (Path(self._folder.name) / word).touch()

    def wait_for(self, enough: Callable[[list[Word]], bool], timeout_s: float) -> None:
        """Collect reports until `enough(heard)` is true.

        Raises:
            TimeoutError: It is still false after `timeout_s`, or the job ended before.
        """
        deadline = time.monotonic() + timeout_s
        while not enough(self.heard):
            self.words.settimeout(0.1)
            try:
                self.heard.append(json.loads(self.words.recv(1 << 16)))
            except TimeoutError:
                if self.launcher.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the last reports are {self.heard[-4:]}; output:\n{self.output[-4000:]}"
                    ) from None

    def processes(self) -> list[int]:
        """Return the ids of this job's running processes, without the launcher."""
        mark = f"{MARK}={self._mark}".encode()
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and int(entry.name) != self.launcher.pid and mark in _environment(entry)
        ]

    def leftovers(self, within_s: float) -> list[str]:
        """Wait up to `within_s` for the job to vanish; return what remains.

        The remains are processes, sockets and files of shared memory.
        """
        deadline = time.monotonic() + within_s
        while True:
            left = [f"process {pid}" for pid in self.processes()] + sorted(traces() - self.before)
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


class LabJob(Job):
    """A job in a lab of simulated hosts, into which faults can be injected.

    Args:
        lab: The options of `multiring lab`.
        rank: The script of a rank.
        task: The task of the script.
        arguments: The arguments of the task.
        engine: "tcp" or "mpi". "mpi" uses the mpich wheel and its mpiexec.
        settings: Environment variables for the ranks.
    """

    def __init__(
        self, lab: str, rank: Path, task: str, *arguments: object, engine: str = "tcp", **settings: object
    ) -> None:
        self.lab = f"evidence-{secrets.token_hex(6)}"
        variant = VARIANTS["multiring-mpi"] if engine == "mpi" else AS_IT_IS
        starter = ["lab", "--name", self.lab, "--launcher", variant.launcher, *lab.split()]
        self._start(starter, rank, task, *arguments, **{**settings, **variant.variables()})

    def fault(self, words: str) -> float:
        """Inject the fault `words` into the lab, for example "kill host1".

        Returns:
            The monotonic time of the request.
        """
        now = time.monotonic()
        ask_lab(self.lab, fault=words.split())
        return now


def traces() -> set[str]:
    """Return multiring's Unix sockets, all TCP sockets and all shared memory files.

    TCP sockets in TIME_WAIT are left out.
    """
    unix = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@multiring" in line}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    time_wait = "06"
    tcp = {" ".join(["tcp", *row[1:4]]) for row in rows if row[3] != time_wait}
    return unix | tcp | {f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir()}  # noqa: S108


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""  # The process has ended, or it belongs to another user.
