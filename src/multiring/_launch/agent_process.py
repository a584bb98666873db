"""A process of the launcher that starts agents: ssh, srun, or an agent of this host."""

import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable
from typing import IO, cast

from multiring._launch.leftovers import signal_group
from multiring._launch.rank_reports import name_of

LAST_WORDS_S = 1.0  # how long a process may take to end and to say why, after its connection has closed
_READ_BYTES = 1 << 16
# How srun tells that tasks have ended, as in "srun: error: host1: task 1: Exited with exit code 1".
_LOST_TASKS = re.compile(r"srun: error: \S+: tasks? (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*): ")
_SHOWN_LINES = 20
_PAUSE_S = 0.01


class AgentProcess:
    """A process that starts an agent, or an agent on each host. No method blocks.

    Args:
        process: the process, the leader of its group, with a pipe as standard error.
        program: the program's name for messages.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", program: str) -> None:
        self._process, self._program = process, program
        self._errors: IO[bytes] | None = cast("IO[bytes]", process.stderr)
        os.set_blocking(self._errors.fileno(), False)
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._dropped = 0  # the number of older lines
        self._partial = b""
        self._kill_at: float | None = None  # set once the process was asked to end
        self._is_killed = False

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def lines_told(self) -> int:
        """Return the number of lines that the process, or the agent through it, has printed."""
        self._read_errors()
        return self._dropped + len(self._lines)

    def told(self, since: int) -> str:
        """Return the last lines that the process, or the agent through it, has printed after the first `since` ones."""
        self._read_errors()
        return "; ".join(list(self._lines)[max(0, since - self._dropped) :])

    def has_lost_task(self, number: int) -> bool:
        """Return whether srun has printed that a task of its step has ended."""
        self._read_errors()
        found = filter(None, map(_LOST_TASKS.match, self._lines))
        spans = [span.partition("-") for each in found for span in each[1].split(",")]
        return any(int(first) <= number <= int(last or first) for first, _, last in spans)

    @property
    def ending(self) -> str:
        """A text that says how the process ended, empty if it has not ended."""
        code = self._process.poll()
        if code is not None and code < 0:
            return f"{self._program} was killed by {name_of(-code)}"
        return "" if code is None else f"{self._program} ended with exit code {code}"

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register the process's standard error with `poll`, with a callable as its data."""
        if self._errors is not None:
            poll.register(self._errors, selectors.EVENT_READ, self._read_errors)

    def ask_to_end(self) -> None:
        """Ask the process to end, and give it a second. `end_if_due` must be called from now on."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + LAST_WORDS_S
            if not self.has_ended:
                signal_group(self._process.pid, signal.SIGTERM)

    @property
    def wake_at(self) -> float | None:
        """The monotonic time at which `end_if_due` must be called, or None."""
        return self._kill_at

    def end_if_due(self) -> bool:
        """Kill the process if its second has passed, and return whether there is nothing more to do.

        A process that has not ended a second after it was killed is left behind: the kernel holds it.
        """
        if self._kill_at is None:
            return False
        if not self.has_ended:
            if time.monotonic() < self._kill_at:
                return False
            if not self._is_killed:
                self._is_killed, self._kill_at = True, time.monotonic() + LAST_WORDS_S
                signal_group(self._process.pid, signal.SIGKILL)
                return False
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        return True

    def wait(self, until: float) -> None:
        """Wait for the process's end, until the monotonic time `until` at most. This method alone blocks."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return

    def _read_errors(self) -> None:
        if self._errors is None:
            return
        try:
            data = os.read(self._errors.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._errors.close()
            self._errors = None
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            lines.append(self._partial)
        shown = [line.decode("utf-8", "replace").rstrip() for line in lines if line.strip()]
        self._dropped += max(0, len(self._lines) + len(shown) - _SHOWN_LINES)
        self._lines += shown


def end_all(processes: Iterable[AgentProcess], until: float) -> None:
    """Wait for the ends of processes until the monotonic time `until`, then end them. This takes 2 s more at most."""
    left = list(processes)
    for process in left:
        process.wait(until)
    for process in left:
        process.ask_to_end()
    while left := [process for process in left if not process.end_if_due()]:
        time.sleep(_PAUSE_S)
