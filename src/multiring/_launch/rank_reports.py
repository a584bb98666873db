"""Receive the ranks' reports to their launcher.

The reports say which process is which rank, which ranks were lost, that the ranks made progress, and what they have
done in their steps so far.

A report is a datagram. The kernel adds the sender's process ID, as seen from the launcher's PID namespace.
"""

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from multiring._settings import RANK_STEPS, JobNews, roll_address
from multiring._steps.step_report import MOST_REPORT_BYTES, StepReport, decode_report

_UCRED = struct.Struct("3i")
_MOST_BYTES = MOST_REPORT_BYTES + len(RANK_STEPS)
ANY = -1  # stands for a lost rank whose process is unknown


class RankReports:
    """The reports of one job's ranks.

    They are stored by each rank's first process, which the launcher started.
    """

    def __init__(self, reports: str) -> None:
        """Listen at the address that is the value of MULTIRING_REPORTS in the ranks."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(roll_address(reports))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.news: set[bytes] = set()
        self.rank_processes: dict[int, list[int]] = {}  # first process -> the processes of its session that are ranks
        self._first_of: dict[int, int] = {}  # rank -> first process
        self._sessions: dict[int, int] = {}  # process that has reported -> first process
        self._lost: dict[int, set[int]] = {}  # first process -> ranks that it has lost
        self._steps: dict[int, bytes] = {}  # first process -> its newest report on its steps

    @property
    def descriptor(self) -> int:
        """The file descriptor to poll."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket. Later reports are lost."""
        self._socket.close()

    def hear(self) -> None:
        """Receive all waiting reports."""
        while True:
            try:
                words, ancillary, _, _ = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_UCRED.size))
            except OSError:
                return
            told = [
                data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            ]
            pid, user, _ = _UCRED.unpack(told[0][: _UCRED.size]) if told else (0, -1, -1)
            if not words.startswith(RANK_STEPS):
                self._take(words, pid)
            elif user == os.geteuid() and (first := self._session_of(pid)) in self.rank_processes:
                self._steps[first] = words[len(RANK_STEPS) :]

    def ranks_lost_by(self, first: int) -> set[int]:
        """Return the ranks that a rank has lost, with ANY for an unknown one; `first` is the rank's first process."""
        return set(self._lost.get(first, ()))

    def take_steps(self) -> dict[int, StepReport]:
        """Return the newest reports on steps since the last call, by the rank's first process."""
        taken, self._steps = self._steps, {}
        found = {first: decode_report(data) for first, data in taken.items()}
        return {first: report for first, report in found.items() if report is not None}

    def lost_by(self, first: int) -> set[int]:
        """Return the first processes of the ranks that a rank has lost.

        `first` is the first process of the rank.

        The set contains ANY if the process of a lost rank is unknown.
        """
        return {self._first_of.get(rank, ANY) for rank in self._lost.get(first, ())} - {first}

    def _take(self, words: bytes, pid: int) -> None:
        if words in {each.value for each in JobNews}:
            self.news.add(words)
            return
        kind, numbers = words[:1], words[1:].split()
        try:
            ranks = [int(each) for each in numbers]
        except ValueError:
            return
        first = self._session_of(pid)
        if first is None:
            return
        if kind == b"J" and len(ranks) == 1:
            self._first_of[ranks[0]] = first
            known = self.rank_processes.setdefault(first, [])
            known += [pid] if pid not in known else []
        elif kind == b"L" and len(ranks) == 2:
            self._lost.setdefault(first, set()).add(ranks[1])

    def _session_of(self, pid: int) -> int | None:
        """Return the first process of a sender, which leads the session of the rank; None if it is unknown.

        A sender that has ended is known by its earlier report. A living one may have the ID of another that has ended.
        """
        with contextlib.suppress(OSError):  # the sender has ended, and its parent has collected its exit code
            self._sessions[pid] = os.getsid(pid)
        return self._sessions.get(pid)


def catches(pid: int, number: int) -> bool:
    """Return whether process `pid` handles or ignores signal `number`."""
    fields = _status(pid)
    bit = 1 << (number - 1)
    return any(int(fields.get(name, "0"), 16) & bit for name in ("SigCgt", "SigIgn"))


def lives(pid: int) -> bool:
    """Return whether process `pid` runs. A zombie does not."""
    return _status(pid).get("State", "Z")[:1] not in "ZX"


def name_of(number: int) -> str:
    """Return a signal's name; real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _status(pid: int) -> Mapping[str, str]:
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
