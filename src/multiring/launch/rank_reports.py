"""What ranks tell their launcher: which process is which rank, which rank has lost which, and what they did together.

Words come as datagrams; the kernel says which process sent them, by the number that it has for this process.
"""

import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from multiring.settings import JobNews, roll_address

_UCRED = struct.Struct("3i")
_MOST_BYTES = 64
ANY = -1  # the rank that a rank lost, where it does not know which


class RankReports:
    """What the ranks of one job have told, by the first process of each: the one that the launcher started."""

    def __init__(self, rendezvous: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(roll_address(rendezvous))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.news: set[bytes] = set()
        self.rank_processes: dict[int, list[int]] = {}  # first process -> the processes in it that are ranks
        self._first_of: dict[int, int] = {}  # rank -> first process
        self._lost: dict[int, set[int]] = {}  # first process -> ranks that it has lost

    @property
    def descriptor(self) -> int:
        """What to poll."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()

    def hear(self) -> None:
        """Take in all that was told."""
        while True:
            try:
                words, ancillary, _, _ = self._socket.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_UCRED.size))
            except OSError:
                return
            told = [
                data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            ]
            pid = _UCRED.unpack(told[0][: _UCRED.size])[0] if told else 0
            self._take(words, pid)

    def lost_by(self, first: int) -> set[int]:
        """Return the first processes of the ranks that the rank with this first process has lost; ANY among them."""
        return {self._first_of.get(rank, ANY) for rank in self._lost.get(first, ())} - {first}

    def _take(self, words: bytes, pid: int) -> None:
        if words in {each.value for each in JobNews}:
            self.news.add(words)
            return
        kind, numbers = words[:1], words[1:].split()
        try:
            first, ranks = os.getsid(pid), [int(each) for each in numbers]  # each rank leads a session
        except (OSError, ValueError):
            return  # it has ended
        if kind == b"J" and len(ranks) == 1:
            self._first_of[ranks[0]] = first
            known = self.rank_processes.setdefault(first, [])
            known += [pid] if pid not in known else []
        elif kind == b"L" and len(ranks) == 2:
            self._lost.setdefault(first, set()).add(ranks[1])


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal, or ignores it."""
    fields = _status(pid)
    bit = 1 << (number - 1)
    return any(int(fields.get(name, "0"), 16) & bit for name in ("SigCgt", "SigIgn"))


def lives(pid: int) -> bool:
    """Return whether a process is more than a zombie."""
    return _status(pid).get("State", "Z")[:1] not in "ZX"


def name_of(number: int) -> str:
    """Return a signal's name."""
    return signal.Signals(number).name


def _status(pid: int) -> Mapping[str, str]:
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
