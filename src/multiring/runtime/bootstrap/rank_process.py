"""Which process is the rank: the first one that joins, of all that a launcher's variables reach, while it lives.

A launcher's variables are inherited by everything that its rank starts, and by everything that the rank's shell starts.
The process that joins claims the rank: it binds an abstract socket whose name is a digest of those variables, which the
kernel gives up when the process ends. It also leaves a mark in its environment, by which its children know it.
docs/decisions/0095-who-is-a-rank.md says why.
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

from multiring.runtime.bootstrap.addresses import peer_credentials
from multiring.settings import leave_mark

_MOST_ASKED = 4096  # how often a holder can be asked who it is: nobody takes what asks out of the queue
_MOST_LEFT_OPEN = 16  # processes that ended, and whose children hold their claim open
_SHOWN = 80
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's place in its job, as `rank()` and the like return it."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process that is a rank. `place` is None where it has not left its mark, so that only its number is known.

    The number is 0 where the process is of another pid namespace, or was asked too often to be asked again.
    """

    pid: int
    place: RankPosition | None = None

    def __str__(self) -> str:
        if self.pid == 0:
            return "another process, whose number cannot be known here,"
        command = _command_of(self.pid)
        return f"process {self.pid}{f' ({command})' if command else ''}"


class _Claims:
    """The sockets by which this process holds ranks, by their names; a fork has none of them."""

    def __init__(self) -> None:
        self.held: dict[str, socket.socket] = {}
        self.is_forgotten_by_forks = False

    def forget(self) -> None:
        for each in self.held.values():
            each.close()
        self.held.clear()


_claims = _Claims()


def claim(key: str) -> RankProcess | None:
    """Make this process the one that `key` stands for until it ends; return the process that is it already, if any.

    Args:
        key: what is equal for all processes that one launcher's variables for one rank have reached.
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
            continue  # it has ended, and something that it forked has the socket still; or it ends just now
        _claims.forget()  # this process has moved on to another job: it keeps one descriptor, however often it does
        _claims.held[key] = holding
        return None
    return None


def release(key: str) -> None:
    """Give up the claim of `key`, for a process that did not become a rank after all."""
    holding = _claims.held.pop(key, None)
    if holding is not None:
        holding.close()


def spawner() -> str:
    """Return what names the process that started this one by multiprocessing; "" where none did."""
    process = sys.modules.get("multiprocessing.process")
    parent = None if process is None else process.parent_process()
    return "" if parent is None else f"{_pid_space()} {parent.pid} {_began(parent.pid)}"


def mark(key: str, place: RankPosition) -> None:
    """Let what this process starts from now on know that it is a rank, and which."""
    told = {"key": _short(key), "pid": os.getpid(), "began": _began(os.getpid()), "pids": _pid_space(), **asdict(place)}
    leave_mark(json.dumps(told, separators=(",", ":")))


def marked(text: str | None, key: str | None) -> RankProcess | None:
    """Return the rank that started this process, if it lives.

    Args:
        text: the mark that this process inherited.
        key: as of `claim`; None stands for any, and another launcher's key has another one.
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
        return None  # nobody's but a stranger's
    return None if pid == os.getpid() else RankProcess(pid, place)


def is_worker_of(rank: RankProcess) -> bool:
    """Return whether this process is a multiprocessing worker of `rank`, or a worker's worker, or their fork server."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    parent = process.parent_process()
    if parent is not None and parent.pid == rank.pid:
        return True
    # While a worker imports the rank's script, it has no parent yet, and this attribute.
    if parent is None and not getattr(process.current_process(), "_inheriting", False):
        return False
    line = list(_ancestors(os.getpid()))
    return rank.pid in line and all(map(_is_of_multiprocessing, line[: line.index(rank.pid)]))


def launch_root(variable: str, value: str) -> str:
    """Return what names the process that the launcher started: the first of this one's ancestors with a variable."""
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
    """Return whether multiprocessing made a process, or it was forked: both have a telling command line."""
    words = _words_of(pid)
    return b"multiprocessing" in b" ".join(words[1:6]) or words == _words_of(_parent_of(pid))


def _short(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""


def _holder_of(name: str) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)
        try:
            asking.connect(name)
        except BlockingIOError:  # somebody holds it, and its queue is full
            return 0
        return peer_credentials(asking).pid
    return None


def lives(pid: int) -> bool:
    """Return whether a process is more than a zombie; one of another pid namespace, number 0, is taken to be."""
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
    """Return when a process began, which tells it from a later one of its number; "" where it is gone."""
    fields = _stat_of(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _stat_of(pid: int) -> list[str]:
    """Return a process's fields from its state on, as proc(5) numbers them from 3; [] where it is gone."""
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
