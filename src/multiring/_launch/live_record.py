"""The record of a running job: a file of JSON lines, to which one launcher appends.

Each line is one JSON object with its `kind` and the time `at_s`, in seconds since 1970:

    job      a launcher begins a job: `format`, `job`, `program`
    start    it starts the ranks, again after a failure: `start` from 0, `ranks`, `hosts` with their numbers of ranks
    newcomer a process comes in after a loss: `rank`, its number, and `host`
    steps    a rank's report: `rank`, and the fields of `multiring._steps.step_report.StepReport`
    said     a message of the launcher: `text`
    ended    a rank's process ended: `rank`, `code` as of subprocess, and `how`
    over     the job ended: `code`, its exit code

A line is written by one call. A process that is killed meanwhile leaves at most one torn line, which readers pass over.
"""

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from multiring._file_locks import try_lock
from multiring._launch.job_process import JobProcess
from multiring._steps.step_report import StepReport
from multiring.errors import ArgumentError

FORMAT = 1
MOST_TEXT = 2000  # characters of a message
_BEGIN = b'{"kind":"job","format":'
_LEAST_SPACE_S = 0.2  # between two reports of one rank; a rank sends one a second


class LiveRecord:
    """The file of a record, open for one writer.

    Args:
        path: the file. A record that is there already goes on; None: a file without a name, which ends with the job.
        say: shows a message if the file cannot be written.

    Raises:
        ArgumentError: the file cannot be opened, is no record, or another job writes to it.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._starts = 0
        self._has_failed = False
        if path is None:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        else:
            self.descriptor = _opened(path)

    def begin(self, job: str, program: str) -> None:
        """Write that a launcher begins a job."""
        self._write({"kind": "job", "format": FORMAT, "job": job, "program": program[:MOST_TEXT]})

    def begin_start(self, ranks: int, hosts: Sequence[tuple[str, int]]) -> None:
        """Write that the ranks are started."""
        self._write({"kind": "start", "start": self._starts, "ranks": ranks, "hosts": list(hosts)})
        self._starts += 1

    def add_newcomer(self, rank: int, host: str) -> None:
        """Write that a newcomer is started."""
        self._write({"kind": "newcomer", "rank": rank, "host": host})

    def add_steps(self, rank: int, report: StepReport) -> None:
        """Write a rank's report."""
        self._write({"kind": "steps", "rank": rank, **report.to_json()})

    def add_text(self, text: str) -> None:
        """Write a message of the launcher."""
        self._write({"kind": "said", "text": text[:MOST_TEXT]})

    def add_end(self, rank: int, code: int, how: str) -> None:
        """Write that a rank's process ended."""
        self._write({"kind": "ended", "rank": rank, "code": code, "how": how[:MOST_TEXT]})

    def end(self, code: int) -> None:
        """Write that the job ended, and close the file."""
        self._write({"kind": "over", "code": code})
        os.close(self.descriptor)

    def _write(self, line: dict[str, Any]) -> None:
        if self._has_failed:  # a line after a torn one would be torn, too
            return
        line = {"kind": line.pop("kind"), **line, "at_s": round(time.time(), 3)}
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self.descriptor, data)
            reason = "" if written == len(data) else "the disk is full"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            self._has_failed = True
            self._say(f"the record {self.path or 'of this job'} is cut off: {reason}; the job goes on without it")


class JobRecorder:
    """Writes what becomes of one start of the ranks; without a record it does nothing.

    Args:
        record: the record, or None.
        ranks: the number of ranks.
        hosts: the hosts with their numbers of ranks.
    """

    def __init__(self, record: LiveRecord | None, ranks: int, hosts: Sequence[tuple[str, int]]) -> None:
        self._record = record
        self._ended: set[int] = set()
        self._next_s: dict[int, float] = {}
        if record is not None:
            record.begin_start(ranks, hosts)

    def add_newcomer(self, rank: int, host: str) -> None:
        """Write that a newcomer is started on a host."""
        if self._record is not None:
            self._record.add_newcomer(rank, host)

    def take(self, rank: int, report: StepReport) -> None:
        """Write a rank's report, unless the rank sends too many."""
        now_s = time.monotonic()
        if self._record is not None and now_s >= self._next_s.get(rank, 0.0):
            self._next_s[rank] = now_s + _LEAST_SPACE_S
            self._record.add_steps(rank, report)

    def say(self, text: str) -> None:
        """Write a message of the launcher."""
        if self._record is not None:
            self._record.add_text(text)

    def look(self, members: Sequence[JobProcess]) -> None:
        """Write which ranks have ended since the last look."""
        if self._record is None or len(self._ended) == len(members):
            return
        for rank, member in enumerate(members):
            if member.code is not None and rank not in self._ended:
                self._ended.add(rank)
                self._record.add_end(rank, member.code, member.ending)


def read_record(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record. A torn line, as a killed launcher leaves it, is passed over."""
    for line in data.split(b"\n"):
        if (found := record_line(line)) is not None:
            yield found


def record_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of a record, or None if it is torn or none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None


def _opened(path: Path) -> int:
    """Open a record, so that every write appends a line to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ArgumentError(f"--record {path}: {error.strerror}; want a file that can be written") from None
    try:
        _require_record(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")  # the launcher before was killed within a line
    return descriptor


def _require_record(descriptor: int, path: Path) -> None:
    """Raise ArgumentError unless a file is empty or a record, and no other job writes to it."""
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        raise ArgumentError(f"--record {path} is no regular file: want one")
    if not try_lock(descriptor):
        raise ArgumentError(f"--record {path}: another job writes to it; name another file")
    if state.st_size and os.pread(descriptor, len(_BEGIN), 0) != _BEGIN:
        raise ArgumentError(
            f"--record {path} is there already, and is not a record that multiring wrote; it was not changed. Name "
            "another file"
        )
