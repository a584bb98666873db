"""Timelines: the recordings of all ranks in one file that rank 0 writes.

A recording lasts from a start call to a stop call.

    start   the ranks agree on rank 0's path; each rank creates its part next to it and reads rank 0's clock
    stop    each rank reads rank 0's clock again and sends its part to rank 0; rank 0 writes the file and confirms

A part is removed once the file contains it. If a rank is lost, rank 0 reads the rank's part from the disk, or marks the
rank in the file as missing. If rank 0 is lost, all parts stay on disk, and `multiring trace merge` makes a file from
them. docs/decisions/0019-timeline.md gives the reasons.
"""

import json
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from multiring._native import Context, FaultKind
from multiring._runtime.events import NAMES, STEPS
from multiring._runtime.group.group import Group
from multiring._runtime.job.membership import Membership
from multiring._runtime.tracing.clocks import FOREVER, MessageTimeLimit, ask_time, clock_name, tell_time
from multiring._runtime.tracing.last_rank import merge_if_last
from multiring._runtime.tracing.recording import Recording
from multiring._version import VERSION
from multiring.errors import ArgumentError, MismatchError, MultiringError, PeerLostError, StallError, StateError
from multiring.trace import Claim, Glossary, Part, TakenError, TraceFile, clear, file_path, part_path, read_part

_log = logging.getLogger("multiring")
_GONE = (PeerLostError, StallError, MismatchError, StateError, TimeoutError)
_WRITTEN, _FAILED = 1, 0
_HOW_TO_MERGE = "`multiring trace merge FILE PART...` makes a timeline of parts"


@dataclass(frozen=True, slots=True)
class RunningTimeline:
    """The timeline in progress. `group` is reserved for its messages."""

    path: Path
    mark_cycles: bool
    group: Group
    recording: Recording


class Timelines:
    """The timelines of one rank, one at a time.

    Args:
        membership: this rank's number, and the size and id of the job.
        context: the native context whose operations are recorded.
        glossary: translates the native core's numbers into words.
        group_named: makes a group of all ranks for a name. The call is local; equal names give the same group.
    """

    def __init__(
        self, membership: Membership, context: Context, glossary: Glossary, group_named: Callable[[str], Group]
    ) -> None:
        self._membership = membership
        self._context = context
        self._glossary = glossary
        self._group_named = group_named
        self._timeline_group: Group | None = None
        self._running: RunningTimeline | None = None

    @property
    def path(self) -> Path | None:
        """The file of the timeline in progress; None if there is no timeline in progress."""
        return None if self._running is None else self._running.path

    def start(self, path: str | os.PathLike[str], *, mark_cycles: bool = False, preview: bool = False) -> None:
        """Start to record.

        Every rank must call this method; only rank 0's arguments are used.

        Args:
            path: the timeline file.
            mark_cycles: whether to mark each operation that starts while no other operation is in flight.
            preview: whether to keep a preview in the file during the recording. It has rank 0's events so far.

        Raises:
            StateError: on every rank: a rank is already recording.
            TakenError: on every rank: another job records into the same file.
            ArgumentError: on every rank: the path is unusable, or a rank cannot write its part next to it.
            PeerLostError, StallError: a rank is lost, or does not make the call.
        """
        if self._timeline_group is None:
            self._timeline_group = self._group_named("timelines")
        claim, where, problem, is_taken = None, Path(), "", False
        if self._membership.rank == 0 and self._running is None:
            try:
                where = file_path(path)
                claim = _claimed(part_path(where, 0))
                clear(where, own=claim.path)
            except ArgumentError as error:
                problem, is_taken = str(error), isinstance(error, TakenError)
        peer_info = {"path": os.fspath(where), "problem": problem, "is_on": self._running is not None}
        peer_info |= {"mark_cycles": mark_cycles, "preview": preview, "timeline": secrets.token_hex(8)}
        peer_info |= {"is_taken": is_taken}
        try:
            told = _exchange(self._timeline_group, peer_info)
            busy = [each for each, peer_info in enumerate(told) if peer_info["is_on"]]
            if busy:
                raise StateError(f"a timeline is on already{_of(busy, told)}; multiring.stop_timeline() ends it")
            if told[0]["problem"]:
                raise (TakenError if told[0]["is_taken"] else ArgumentError)(told[0]["problem"])
            self._running = self._begin(self._timeline_group, told[0], claim)
        finally:
            if claim is not None:
                claim.release()

    def stop(self, patience: MessageTimeLimit = FOREVER) -> None:
        """Stop recording and return once the file is written.

        Every rank must call this method.

        Args:
            patience: the limit of the wait for other ranks.

        Raises:
            StateError: no timeline is in progress; or the file could not be written. In the second case every part
                stays on disk, and the message gives its path.
        """
        running = self._running
        if running is None:
            raise StateError("no timeline is on; multiring.start_timeline(path) starts one")
        self._running = None
        running.recording.end()
        try:
            if self._membership.rank == 0:
                self._collect(running, patience)
            else:
                self._hand_over(running, patience)
        except StateError:  # the error's text already gives the path of the part
            raise
        except BaseException:
            _log.warning("%s", self._left(running, "the writing was interrupted"))
            raise
        finally:
            running.recording.close()

    def close(self, patience: MessageTimeLimit, *, is_wanted: bool) -> None:
        """Stop the timeline in progress, if any, at the end of the job.

        Errors are logged.

        Args:
            patience: as for `stop`.
            is_wanted: whether the other ranks expect this rank to end. If not, this rank does not wait for them.
        """
        running = self._running
        if running is None:
            return
        try:
            if is_wanted or self._membership.size == 1:
                self.stop(patience)
                return
            self._running = None
            running.recording.end()
            running.recording.data()
            running.recording.close()
            _log.warning("%s", self._left(running, "this rank ends before the others"))
        except (MultiringError, OSError) as error:
            _log.warning("%s", error)

    def leave_part(self, *, is_wanted: bool) -> Callable[[float], None]:
        """Stop recording and leave this rank's part on the disk.

        All ranks of the job are on this host.

        Args:
            is_wanted: as for `close`. If it is False, a warning gives the path of the part.

        Returns:
            A function to call after this rank has left the job. It waits the given number of seconds for the other
            ranks, and writes the timeline if this rank is the last to leave.
        """
        running = self._running
        if running is None:
            return lambda _: None
        self._running = None
        running.recording.end()
        running.recording.data()
        running.recording.close()
        if not is_wanted and self._membership.size > 1:
            _log.warning("%s", self._left(running, "this rank ends before the others"))
        return lambda patience_s: merge_if_last(running.path, self._membership.size, patience_s)

    def _begin(self, meeting: Group, peer_info: dict[str, Any], claim: Claim | None) -> RunningTimeline:
        rank = self._membership.rank
        path = Path(peer_info["path"])
        recording = self._agreed_recording(meeting, path, peer_info, claim)
        try:
            group = self._group_named(f"timeline {peer_info['timeline']}")
            if rank == 0:
                for other in range(1, group.size):
                    tell_time(group, other, FOREVER)
            else:
                recording.note(ask_time(group, FOREVER))
            recording.begin(partial(_write_preview, path, peer_info) if rank == 0 and peer_info["preview"] else None)
        except BaseException:
            recording.remove()
            raise
        return RunningTimeline(path, peer_info["mark_cycles"], group, recording)

    def _agreed_recording(
        self, meeting: Group, path: Path, peer_info: dict[str, Any], claim: Claim | None
    ) -> Recording:
        """Create this rank's part; return it once all ranks have created theirs."""
        recording, problem, is_taken = None, "", False
        try:
            claim = claim or _claimed(part_path(path, self._membership.rank))
            recording = Recording(claim, self._context, self._glossary, self._who(peer_info))
        except ArgumentError as error:
            problem, is_taken = str(error), isinstance(error, TakenError)
        problems: list[tuple[str, bool]] = []
        try:
            problems = _exchange(meeting, (problem, is_taken))
        finally:
            if recording is not None and (any(text for text, _ in problems) or not problems):
                recording.remove()
        faulty = [each for each, (text, _) in enumerate(problems) if text]
        if faulty or recording is None:
            text, is_taken = problems[faulty[0]]
            kind = TakenError if is_taken else ArgumentError
            raise kind(f"no timeline can begin: {text}{_of(faulty, problems)}")
        return recording

    def _who(self, peer_info: dict[str, Any]) -> dict[str, Any]:
        membership = self._membership
        versions = {"multiring": VERSION, "python": platform.python_version(), "numpy": np.__version__}
        versions |= {"torch": str(sys.modules["torch"].__version__)} if "torch" in sys.modules else {}
        return {
            "rank": membership.rank,
            "size": membership.size,
            "job": membership.job,
            "timeline": peer_info["timeline"],
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "versions": versions,
            "clock": clock_name(),
            "names": NAMES,
            "steps": STEPS,
            "faults": [FaultKind(i).name.lower() for i in range(len(FaultKind))],
            "wall_s": time.time(),
            "start_ns": time.monotonic_ns(),
            "mark_cycles": peer_info["mark_cycles"],
        }

    # ---- the end, on ranks other than 0

    def _hand_over(self, running: RunningTimeline, patience: MessageTimeLimit) -> None:
        group, recording = running.group, running.recording
        answer = np.zeros(1, np.uint8)
        data = b""
        try:
            recording.note(ask_time(group, patience))
            data = recording.data()
            patience.wait(group.send_async(np.array([len(data)]), 0))
            patience.wait(group.send_async(np.frombuffer(data, np.uint8), 0))
            patience.wait(group.recv_async(answer, 0))
        except _GONE as error:
            if not data:
                recording.data()
            raise StateError(self._left(running, f"rank 0 does not accept it: {error}")) from error
        if answer[0] == _FAILED:
            raise StateError(self._left(running, f"rank 0 could not write {running.path}"))
        recording.remove()

    def _left(self, running: RunningTimeline, why: str) -> str:
        where = running.recording.path
        return f"rank {self._membership.rank}'s part of the timeline stays in {where}: {why}; {_HOW_TO_MERGE}"

    # ---- the end, on rank 0

    def _collect(self, running: RunningTimeline, patience: MessageTimeLimit) -> None:
        writing = _Writing(running)
        come: list[int] = []
        try:
            writing.add(running.recording.data())
            for rank in range(1, running.group.size):
                try:
                    data = _received(running.group, rank, patience)
                except _GONE as error:
                    writing.add_left(rank, error)
                else:
                    come.append(rank)
                    writing.add(data)
        except BaseException:
            writing.discard()
            raise
        failure = writing.close()
        for rank in come:
            try:
                verdict = np.array([_WRITTEN if failure is None else _FAILED], np.uint8)
                patience.wait(running.group.send_async(verdict, rank))
            except _GONE as error:
                _log.warning(
                    "rank %d cannot be told whether the timeline %s was written: %s", rank, running.path, error
                )
        if failure is not None:
            why = f"{running.path} cannot be written: {failure.strerror}"
            raise StateError(self._left(running, why)) from failure


class _Writing:
    """The timeline file while rank 0 adds the parts.

    After a write error it ignores further parts.
    """

    def __init__(self, running: RunningTimeline) -> None:
        self._running = running
        self._failure: OSError | None = None
        self._taken: list[Path] = []
        self._timeline = ""
        self._file: TraceFile | None = None
        try:
            self._file = TraceFile(running.path, mark_cycles=running.mark_cycles)
        except OSError as error:
            self._failure = error

    def add(self, data: bytes) -> None:
        part = read_part(data)
        if part.rank == 0:
            self._timeline = part.who["timeline"]
        self._add(part)

    def _add(self, part: Part) -> None:
        if self._file is None or self._failure is not None:
            return
        try:
            self._file.add(part)
        except OSError as error:
            self._failure = error
            return
        end = part.end or {}
        if end.get("dropped"):
            _log.warning("the timeline lacks %d events of rank %d, which came too fast", end["dropped"], part.rank)

    def add_left(self, rank: int, error: Exception) -> None:
        """Add the part that a missing rank left on this disk.

        Without such a part, mark the rank as missing in the file.
        """
        why = str(error)
        path = part_path(self._running.path, rank)
        try:
            part = read_part(path.read_bytes())
        except (OSError, ArgumentError):
            part = None
        if part is None or part.who["timeline"] != self._timeline:
            if self._file is not None:
                self._file.lack(rank, why)
            _log.warning("the timeline %s lacks rank %d: %s", self._running.path, rank, why)
            return
        self._add(part)
        if isinstance(error, PeerLostError):  # the rank does not write to its part any more
            self._taken.append(path)
        _log.warning("the timeline %s contains the part that rank %d left on disk: %s", self._running.path, rank, why)

    def discard(self) -> None:
        """Remove the unfinished file. The parts stay on disk."""
        if self._file is not None:
            self._file.discard()

    def close(self) -> OSError | None:
        """Move the finished file to its path. Return the error if this fails, else None."""
        if self._file is not None and self._failure is None:
            try:
                self._file.close()
            except OSError as error:
                self._failure = error
        if self._failure is None:
            # Rank 0's part is removed first: its existence means that the parts on disk contain all data of the file.
            self._running.recording.remove()
            for path in self._taken:
                path.unlink(missing_ok=True)
        return self._failure


def _claimed(part: Path) -> Claim:
    """Create and lock the file of a part.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        return Claim(part)
    except OSError as error:
        raise ArgumentError(f"{part} cannot be written: {error.strerror}") from None


def _write_preview(path: Path, peer_info: dict[str, Any], data: bytes) -> None:
    """Write a timeline of rank 0 alone. The timeline of all ranks replaces it later."""
    part = read_part(data)
    file = TraceFile(path, mark_cycles=peer_info["mark_cycles"])
    file.add(part)
    for rank in range(1, part.who["size"]):
        file.lack(rank, "it is added at the end")
    file.close()


def _received(group: Group, rank: int, patience: MessageTimeLimit) -> bytes:
    tell_time(group, rank, patience)
    size = np.zeros(1, np.int64)
    patience.wait(group.recv_async(size, rank))
    data = np.zeros(int(size[0]), np.uint8)
    patience.wait(group.recv_async(data, rank))
    return data.tobytes()


def _exchange(group: Group, value: Any) -> list[Any]:
    """Return every rank's `value`, which must be representable in JSON."""
    lines = group.all_gather(np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8))
    return [json.loads(line) for line in bytes(lines).splitlines()]


def _of(ranks: list[int], whole: list[Any]) -> str:
    return "" if len(ranks) == len(whole) else f" (on {'rank' if len(ranks) == 1 else 'ranks'} {str(ranks)[1:-1]})"
