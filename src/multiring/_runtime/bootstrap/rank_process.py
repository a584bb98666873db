"""Decide which process is the rank.

All processes that a rank or its shell starts inherit the launcher's variables. The first of these processes that joins
is the rank, as long as it lives. It claims the rank by binding an abstract socket, whose name is a digest of the
variables. The kernel releases the socket when the process ends. The process also sets a mark in its environment, by
which its children recognize the rank. docs/decisions/0095-who-is-a-rank.md gives the reasons.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from multiring._runtime.bootstrap.addresses import peer_credentials
from multiring._settings import leave_mark

_MOST_ASKED = 4096  # how often to look up a claim's owner: each look-up leaves a connection that is never accepted
_MOST_LEFT_OPEN = 16  # how many sockets of ended processes to skip; their children hold them open
_SHOWN = 80
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's numbers in its job.

    The numbers are the values of `rank()`, `size()`, `local_rank()` and `local_size()`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process that is a rank.

    `place` is None if this process has inherited no mark of the rank. `pid` is 0 if the rank is in another pid
    namespace, or if its claim was looked up too often.
    """

    pid: int
    place: RankPosition | None = None

    def __str__(self) -> str:
        if self.pid == 0:
            return "another process, whose pid is unknown here,"
        command = _command_of(self.pid)
        return f"process {self.pid}{f' ({command})' if command else ''}"


class _Claims:
    """The sockets with which this process claims ranks, by key.

    A forked process closes its copies of the sockets.
    """

    def __init__(self) -> None:
        self.held: dict[str, socket.socket] = {}
        self.is_forgotten_by_forks = False

    def forget(self) -> None:
        for each in self.held.values():
            each.close()
        self.held.clear()


_claims = _Claims()


def claim(key: str) -> RankProcess | None:
    """Claim the rank of `key` for this process until it ends.

    Args:
        key: a text that is equal in all processes that have inherited one launcher's variables for one rank.

    Returns:
        None on success; else the living process that holds the claim.
    """
    if key in _claims.held:
        return None
    if not _claims.is_forgotten_by_forks:
        os.register_at_fork(after_in_child=_claims.forget)
        _claims.is_forgotten_by_forks = True
    digest = hashlib.sha256(f"{os.getuid()} {key}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    for number in range(_MOST_LEFT_OPEN):
        name = f"\0multiring-rank-{digest}-{number}"
        holding = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holding.bind(name)
            holding.listen(_MOST_ASKED)
        except OSError:
            holding.close()
            holder = _holder_of(name)
            if holder is not None and lives(holder):
                return RankProcess(holder)
            continue  # the owner has ended, but a fork still has the socket; or the owner is just ending
        _claims.forget()  # a process that joins several jobs in sequence keeps a single claim
        _claims.held[key] = holding
        return None
    return None


def release(key: str) -> None:
    """Release the claim of `key`, because this process could not join as the rank."""
    holding = _claims.held.pop(key, None)
    if holding is not None:
        holding.close()


def spawner() -> str:
    """Return an identifier of this process's multiprocessing parent; "" without one."""
    process = sys.modules.get("multiprocessing.process")
    parent = None if process is None else process.parent_process()
    return "" if parent is None else f"{_pid_space()} {parent.pid} {_began(parent.pid)}"


def mark(key: str, place: RankPosition) -> None:
    """Set the mark that identifies this process as the rank to its child processes."""
    told = {"key": _short(key), "pid": os.getpid(), "began": _began(os.getpid()), "pids": _pid_space(), **asdict(place)}
    leave_mark(json.dumps(told, separators=(",", ":")))


def marked(text: str | None, key: str | None) -> RankProcess | None:
    """Return the living rank that started this process, directly or indirectly.

    Args:
        text: the mark that this process inherited.
        key: as for `claim`; a mark of another key is ignored. None accepts any key.
    """
    if text is None:
        return None
    try:
        told = json.loads(text)
        place = RankPosition(*(int(told[name]) for name in ("rank", "size", "local_rank", "local_size")))
        pid, is_other = int(told["pid"]), key is not None and told["key"] not in ("", _short(key))
        if is_other or told["pids"] != _pid_space() or told["began"] != _began(pid):
            return None
    except (ValueError, KeyError, TypeError):
        return None  # not a mark of multiring
    return None if pid == os.getpid() else RankProcess(pid, place)


def is_worker_of(rank: RankProcess) -> bool:
    """Return whether this process is a multiprocessing worker of `rank`.

    A worker's worker and a fork server also count.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    parent = process.parent_process()
    if parent is not None and parent.pid == rank.pid:
        return True
    # While a worker imports the rank's script, the worker has no parent process yet, but it has this attribute.
    if parent is None and not getattr(process.current_process(), "_inheriting", False):
        return False
    line = list(_ancestors(os.getpid()))
    return rank.pid in line and all(map(_is_of_multiprocessing, line[: line.index(rank.pid)]))


def launch_root(variable: str, value: str) -> str:
    """Return an identifier of the process that the launcher started.

    The function follows this process's ancestors as long as they have the variable with this value. The last of these
    processes is the one that the launcher started.
    """
    wanted = f"{variable}={value}".encode("utf-8", "surrogateescape")
    root = os.getpid()
    for pid in _ancestors(root):
        try:
            if wanted not in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                break
        except OSError:
            break
        root = pid
    return f"{root} {_began(root)}"


def _is_of_multiprocessing(pid: int) -> bool:
    """Return whether a process was created by multiprocessing or by a fork.

    The command line decides.
    """
    words = _words_of(pid)
    return b"multiprocessing" in b" ".join(words[1:6]) or words == _words_of(_parent_of(pid))


def _short(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""


def _holder_of(name: str) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)
        try:
            asking.connect(name)
        except BlockingIOError:  # a process holds the claim, but its queue is full
            return 0
        return peer_credentials(asking).pid
    return None


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie.

    For pid 0, a process of another pid namespace, return True.
    """
    return pid == 0 or _stat_of(pid)[:1] not in ([], ["Z"], ["X"])


def _ancestors(pid: int) -> Iterator[int]:
    """Yield `pid`, its parent, and so on."""
    while pid > 0:
        yield pid
        pid = _parent_of(pid)


def _parent_of(pid: int) -> int:
    fields = _stat_of(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def _began(pid: int) -> str:
    """Return the start time of a process; "" if the process has ended.

    The time distinguishes reused pids.
    """
    fields = _stat_of(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _stat_of(pid: int) -> list[str]:
    """Return a process's fields of /proc/PID/stat from its state (field 3) on.

    The list is empty if the process does not exist.
    """
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _words_of(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _command_of(pid: int) -> str:
    words = b" ".join(_words_of(pid)).decode(errors="replace").strip()
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _pid_space() -> int:
    return (_PROC / "self" / "ns" / "pid").stat().st_ino
