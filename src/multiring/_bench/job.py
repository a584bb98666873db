"""Run the bench's jobs one after the other, each with a deadline, and leave no process behind."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from multiring._launch.leftovers import end_leftovers, job_processes, signal_group
from multiring._launch.signals import StopSignals
from multiring._launch.watchdog import Watchdog
from multiring._settings import environment_of, inherited_environment
from multiring.errors import ArgumentError, LaunchError, MultiringError

_GRACE_S = 6.0  # a launcher gives its ranks 2 s, and then takes down a lab
_LEFTOVERS_S = 2.0
_LONGEST_S = 86_400.0
_SHOWN_BYTES = 1 << 14
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCommand:
    """One process that starts all ranks of a job: a launcher's command line, and additions to the environment."""

    command: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAnswer:
    """One rank's answer: the seconds of each call, or (`not_offered`) the reason for missing times.

    `calls`: if not 0, each of `seconds` is the median of so many calls.
    """

    seconds: tuple[float, ...] = ()
    version: str = ""
    settings: Mapping[str, str]
    not_offered: str = ""
    wrong: str = ""
    calls: int = 0


class WrongResultError(MultiringError, RuntimeError):
    """A library's result differs from NumPy's; the library was not timed."""


class JobError(LaunchError):
    """A job failed, or did not end in time.

    The message has the output of its processes.
    """


class StoppedError(MultiringError, RuntimeError):
    """A signal ended the bench; `exit_code` is the exit code that a shell reports."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} received")
        self.exit_code = 128 + number


@final
class Jobs:
    """A context manager that runs jobs.

    No process of a job remains after the end, even after kill -9.

    `folder` is a new directory in TMPDIR for the jobs' cases and answers. It is removed at the end, except after
    kill -9. Use it in the main thread only, because it handles signals.

    Raises:
        ArgumentError: the deadline is out of range.
    """

    def __init__(self, deadline_s: float) -> None:
        if not 0 < deadline_s <= _LONGEST_S:  # rejects NaN too
            raise ArgumentError(
                f"a deadline of {deadline_s:g} s: want more than 0 and at most {_LONGEST_S:.0f} s, a day"
            )
        self._deadline_s = deadline_s
        self._name = f"bench-{secrets.token_hex(8)}"

    def __enter__(self) -> "Jobs":
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="multiring-bench-")))
            self._watchdog = Watchdog(self._name)
            stack.callback(self._watchdog.dismiss)
            self._signals = stack.enter_context(StopSignals())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, title: str, start: JobCommand) -> None:
        """Run a job to its end; `title` is the job's name in messages.

        Raises:
            JobError: the job cannot be started, ended with an exit code other than 0, or missed the deadline.
            StoppedError: SIGINT, SIGTERM or SIGHUP came; the job has been ended.
        """
        environment = inherited_environment() | dict(start.variables) | environment_of(job=self._name)
        output = self.folder / "output"
        with output.open("wb") as sink:
            try:
                process = subprocess.Popen(  # noqa: S603 -- a launcher and a worker of ours
                    start.command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise JobError(f"{title}: cannot start {start.command[0]!r}: {error.strerror}") from None
        self._watchdog.watch(process.pid)
        number, in_time = None, True
        try:
            number, in_time = self._wait(process)
        finally:
            if process.returncode is None:
                _end(process)
            self._watchdog.forget(process.pid)
            if job_processes(self._name):
                end_leftovers(self._name, (), _LEFTOVERS_S)
        if number is not None:
            raise StoppedError(number)
        if not in_time or process.returncode != 0:
            how = f"exit code {process.returncode}" if in_time else f"no end within {self._deadline_s:g} s"
            raise JobError(f"{title}: {how}; {_shown(output)}\nits command was: {' '.join(start.command)}")

    def run_for(self, title: str, start: JobCommand, answers_so_far: Callable[[], list[_T]], ranks: int) -> list[_T]:
        """Run a job as `run` does, and return the answers of its `ranks` ranks.

        Args:
            title: the job's name in messages.
            start: how to start it.
            answers_so_far: returns the ranks' answers. It raises an error for a wrong result, because this error
                explains a failed job best.
            ranks: the number of answers to expect.

        Raises:
            JobError: as `run`, or a rank left no answer.
            StoppedError: as `run`.
        """
        try:
            self.run(title, start)
        except JobError:
            answers_so_far()
            raise
        found = answers_so_far()
        if len(found) != ranks:
            raise JobError(f"{title}: only {len(found)} of {ranks} ranks wrote their results")
        return found

    def _wait(self, process: "subprocess.Popen[bytes]") -> tuple[int | None, bool]:
        """Return the signal that came, or None, and whether the process or a signal ended the wait in time."""
        end = time.monotonic() + self._deadline_s
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        while process.poll() is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return None, False
            poll.poll(left_s * 1e3)
            self._signals.clear()
            if caught := self._signals.take():
                return caught[0], True
        return None, True


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a launcher to end its job; kill it if it does not end in time."""
    signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _shown(output: Path) -> str:
    with output.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _SHOWN_BYTES, 0))
        text = file.read().decode(errors="replace").rstrip()
    if not text:
        return "it wrote nothing"
    cut = f" (the last {_SHOWN_BYTES} of {size} bytes)" if size > _SHOWN_BYTES else ""
    return f"its processes wrote{cut}:\n" + "\n".join(f"    {line}" for line in text.splitlines())


def answers(folder: Path, ranks: int) -> list[RankAnswer]:
    """Return the answers that the ranks of a job left in `folder`, in the order of ranks.

    Raises:
        WrongResultError: a rank had a wrong result.
    """
    found = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}.json"
        if path.exists():
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found.append(RankAnswer(**{"settings": {}, **fields}))
    for answer in found:
        if answer.wrong:
            raise WrongResultError(answer.wrong)
    return found
