"""One trial as a job of its own: its process, what it has reported, and how it ended."""

import math
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from multiring._launch.cores import cores_of_cpus, share_cpus, usable_cpus
from multiring._launch.leftovers import signal_group
from multiring._launch.logs import open_log
from multiring._launch.own_modules import module_command
from multiring.trials.command.lines import LinePattern, ReportedValue, own_report

_FIRST = b"[0] "  # before each line of rank 0
_LAST_LINES = 12
_LINE_BYTES = 1 << 16  # a longer line is cut there
_READ_BYTES = 1 << 16
_MOST_READS = 32  # at a time: more than a pipe holds, so that the last read of an ended job takes all of it
_MORE_S = 20.0  # how long a launcher may take to end beyond the grace of its ranks
_FAILURE = re.compile(r"multiring: (rank \d+) \(pid [^)]*\) failed: (.*)")
_MEMORY = re.compile(r"multiring: (the system killed it, because the memory .*)")
_NO_MEMORY = re.compile(r"MemoryError|OutOfMemoryError|ResourceExhaustedError|RESOURCE_EXHAUSTED")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCommand:
    """What to run for a trial."""

    words: tuple[str, ...]  # the program and its arguments
    slots: tuple[int, ...]  # the numbers of the ranks that it takes, of `of`
    of: int
    devices: tuple[str, ...] | None  # what CUDA_VISIBLE_DEVICES names, by slot; None leaves it as it is
    grace_s: float
    log_dir: Path | None
    log: str  # the name of the log file in `log_dir`

    def run_words(self) -> list[str]:
        """Return the words after `multiring`."""
        variables = []
        if self.devices is not None:
            shown = ",".join(self.devices[slot] for slot in self.slots)
            variables = ["--env", f"CUDA_VISIBLE_DEVICES={shown}"]
        count = str(len(self.slots))
        return ["run", "-n", count, "--here", "--grace", f"{self.grace_s:g}", *variables, "--", *self.words]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPatterns:
    """The lines that count."""

    report: LinePattern | None = None
    result: LinePattern | None = None


@dataclass(slots=True, eq=False)
class TrialJob:
    """A running job. One thread uses it."""

    command: TrialCommand
    patterns: JobPatterns
    tell: Callable[[int, float], None]  # is called with each report
    problem: str = ""  # why the trial fails, whatever its exit code
    reports: dict[int, float] = field(default_factory=dict)
    results: list[float] = field(default_factory=list)
    code: int | None = None
    was_stopped: bool = False  # it did not end by itself
    log_problem: str = ""  # why its log is not whole
    _kill_at: float | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    _log: "IO[bytes] | None" = None
    _rests: dict[int, bytearray] = field(default_factory=dict)  # of each stream, by descriptor
    _errors: "deque[str]" = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    _said: str = ""  # what the launcher said of the failure

    def start(self) -> None:
        """Start the process.

        Raises:
            LaunchError: the log file cannot be written, or is not multiring's.
            OSError: the system refuses the process.
        """
        self._log = open_log(self.command.log_dir, self.command.log)
        whole = os.sched_getaffinity(0)
        # Trials side by side must not share cores: the launcher of each divides those that it may use.
        shares = share_cpus(cores_of_cpus(usable_cpus()), self.command.of)
        os.sched_setaffinity(0, frozenset().union(*(shares[slot] for slot in self.command.slots)))
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- the user's command
                module_command("multiring.trials.command.trial_process", str(os.getpid()), *self.command.run_words()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at a terminal comes to this process only, which ends the trials
            )
        finally:
            os.sched_setaffinity(0, whole)
        for stream in self.streams:
            os.set_blocking(stream, False)
            self._rests[stream] = bytearray()

    @property
    def streams(self) -> list[int]:
        """The descriptors to read from."""
        process = self._started()
        return [cast("IO[bytes]", each).fileno() for each in (process.stdout, process.stderr) if not each.closed]  # type: ignore[union-attr]

    def read(self, stream: int) -> bool:
        """Read what has come on one of `streams`, or some of it; return whether there may be more.

        A program that writes faster than this process reads must hold up neither signals nor time limits.
        """
        for _ in range(_MOST_READS):
            try:
                data = os.read(stream, _READ_BYTES)
            except BlockingIOError:
                return True
            rest = self._rests[stream]
            rest += data or (b"\n" if rest else b"")
            while (end := rest.find(b"\n")) >= 0 or len(rest) > _LINE_BYTES:
                is_whole = 0 <= end <= _LINE_BYTES
                end = end if is_whole else _LINE_BYTES
                line = bytes(rest[:end])
                del rest[: end + is_whole]
                self._take(line, is_out=stream == cast("IO[bytes]", self._started().stdout).fileno())
            if not data:
                return False
        return True

    def poll(self) -> bool:
        """Return whether the process has ended; kill it if it is late."""
        process = self._started()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            signal_group(process.pid, signal.SIGKILL)  # the kernel kills its ranks, and a watchdog what they started
        self.code = process.poll()
        return self.code is not None

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the job to end; its launcher kills what goes on after the grace."""
        process = self._started()
        if self._kill_at is not None and not at_once:
            return
        self._kill_at = self._kill_at or time.monotonic() + self.command.grace_s + _MORE_S
        if process.poll() is None:
            self.was_stopped = True
            os.kill(process.pid, signal.SIGTERM)  # a second one makes the launcher kill its ranks

    def kill(self) -> None:
        """End the job at once, if it still runs. The kernel kills its ranks."""
        process = self._started()
        if process.poll() is None:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """Close what the job has opened, after its end."""
        process = self._started()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        if self._log is not None:
            self._log.close()

    def value(self) -> float | None:
        """Return the trial's value; None if it has none, and `problem` says why."""
        if self.problem:
            return None
        if self.code:
            self.problem = self._failure()
        elif self.patterns.result is not None:
            if not self.results:
                self.problem = f"it never printed its result on stdout of rank 0: {self.patterns.result.text!r}"
            elif len(self.results) > 1 and len(set(self.results)) > 1:
                self.problem = (
                    f"it printed {len(self.results)} different results: {self.results[0]!r}, {self.results[1]!r}"
                )
        elif not self.reports:
            wanted = "multiring.trials.report(value, step)"
            shown = "" if self.patterns.report is None else f", nor a line like {self.patterns.report.text!r}"
            self.problem = f"it never reported: its rank 0 made no call of {wanted}{shown}"
        if self.problem:
            return None
        found = self.results[0] if self.patterns.result is not None else self.reports[max(self.reports)]
        if math.isnan(found):
            self.problem = "its value is NaN"
            return None
        return found

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines of standard error."""
        return list(self._errors)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("internal error: the job was not started")
        return self._process

    def _take(self, line: bytes, *, is_out: bool) -> None:
        self._write_log(line + b"\n")
        text = line.decode("utf-8", "replace")
        if not is_out:
            found = _FAILURE.match(text)
            if found is not None and not self._said:
                self._said = f"{found[1]}: {found[2]}"
            elif memory := _MEMORY.match(text):
                self._said = f"out of memory: {self._said}: {memory[1]}"
            elif not text.startswith("multiring: "):
                self._errors.append(text)
            return
        if line.startswith(_FIRST):
            for part in text[len(_FIRST) :].split("\r"):  # a progress bar writes its line again and again
                if not self.problem:
                    self._take_line(part)

    def _write_log(self, data: bytes) -> None:
        """Write to the log. A full disk ends the log, and not the trial."""
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            self.log_problem = f"its log in {self.command.log_dir} is not whole: {error.strerror}"
            self._log.close()
            self._log = None

    def _take_line(self, text: str) -> None:
        """Take a line of rank 0's standard output."""
        if self.patterns.result is not None and (result := self.patterns.result.found_in(text)) is not None:
            self.results.append(result.value)
        found = own_report(text)
        if found is None and self.patterns.report is not None:
            found = self.patterns.report.found_in(text)
        if found is not None:
            self._take_report(found)

    def _take_report(self, found: ReportedValue) -> None:
        step = len(self.reports) if found.step is None else found.step
        if step in self.reports:
            self.problem = f"it reported step {step} twice: {self.reports[step]!r}, then {found.value!r}"
        elif step > 1 << 53:
            self.problem = f"it reported step {step}: want less than 2**53"
        else:
            self.reports[step] = found.value
            self.tell(step, found.value)

    def _failure(self) -> str:
        """Return why the job has failed."""
        lines = [re.sub(r"^(\[\d+\] |    )", "", each) for each in self._errors]
        last = next((each for each in reversed(lines) if each.strip()), "")
        code = self.code or 0
        ending = self._said or (f"exit code {code}" if code > 0 else f"its launcher was killed by signal {-code}")
        if ending.startswith("out of memory"):
            return ending
        if any(_NO_MEMORY.search(each) for each in lines):
            shown = next(each for each in reversed(lines) if _NO_MEMORY.search(each))
            return f"out of memory: {ending}: {shown[:200]}"
        if "killed by SIGKILL" in ending or code == 128 + signal.SIGKILL:
            return f"out of memory, or killed by a user: {ending}; the system kills with SIGKILL if memory is used up"
        return f"{ending}: {last[:200]}" if last else ending
