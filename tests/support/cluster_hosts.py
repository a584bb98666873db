"""Virtual hosts for the nodes of a cluster: each has a name, an address and a /dev/shm of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from multiring.lab import Lab, LabPlan

# Prints the command line of each process of the host, one a line, without this program and the host's pid 1.
_PROCESSES = """
import os
for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
    if pid not in (1, os.getpid()):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().split(bytes(1))
            state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            print(b" ".join(words).decode(errors="replace").strip().replace(chr(10), " "))
"""


@final
class ClusterHosts:
    """Two virtual hosts, host0 and host1; a context manager.

    Args:
        folder: a folder for logs.
        variables: more variables for every process.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
        home = (
            folder / "home"
        )  # settings and marks of these programs in the user's home do not count, and none are left
        home.mkdir(exist_ok=True)
        self.environment = {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        self._stack = ExitStack()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "ClusterHosts":
        self._lab = self._stack.enter_context(Lab(LabPlan(hosts=2, slots=2)))
        self._stack.callback(self._reap)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        return str(self._lab.plan.address(host, 0))

    def start(self, host: int, name: str, *command: str, **variables: str) -> Path:
        """Start a process of the cluster on a host, and return the file of its output."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            self._started.append(self._popen(host, command, stdout=file, stderr=subprocess.STDOUT, **variables))
        return log

    def run(self, host: int, *command: str, timeout_s: float, text: str = "", **variables: str) -> tuple[int, str]:
        """Run a command on a host, and return its exit code and output."""
        process = self._popen(
            host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **variables
        )
        self._started.append(process)
        try:
            output, _ = process.communicate(text.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{command} ran for more than {timeout_s} s: {output.decode()}") from None
        return process.returncode, output.decode()

    def processes(self, host: int) -> list[str]:
        """Return the command lines of the processes on a host."""
        return self.run(host, sys.executable, "-I", "-S", "-c", _PROCESSES, timeout_s=60)[1].splitlines()

    def _popen(self, host: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        own = {name: options.pop(name) for name in list(options) if name.isupper()}
        made = self._lab.hosts[host]
        with made.birthplace():
            return subprocess.Popen(
                command,
                env={**self.environment, **own},
                preexec_fn=made.preparation(self.folder),  # noqa: PLW1509 -- the tests' processes have one thread here
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, **options},
            )

    def _reap(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_for(log: Path, text: str, timeout_s: float = 60.0, count: int = 1) -> None:
    """Wait until `text` is `count` times in a log."""
    until = time.monotonic() + timeout_s
    while log.read_text(errors="replace").count(text) < count:
        assert time.monotonic() < until, f"{log} has no {text!r}: {log.read_text(errors='replace')}"
        time.sleep(0.1)
