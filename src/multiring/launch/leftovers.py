"""Find and end what a job leaves behind: processes its ranks started, however they detached themselves.

A process of the job is known by MULTIRING_JOB in the environment it was started with, which every child
inherits through fork, exec and setsid alike. A process that was given another environment is found as a descendant
of the launcher, which adopts what its ranks leave (PR_SET_CHILD_SUBREAPER); once the launcher itself was killed, by its
rank's process group or session only.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from multiring.settings import environment_of

_PROC = Path("/proc")
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1
_ZOMBIE_STATES = ("Z", "X")
_PR_SET_CHILD_SUBREAPER = 36
_KILLED_S = 2.0  # how long a killed process may take to disappear


def job_processes(job: str) -> list[int]:
    """Return the living processes of `job`, and of jobs started within it."""
    (setting,) = environment_of(job=job).items()
    mark = "=".join(setting).encode()
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal() and _carries(entry, mark)]


def _carries(process: Path, mark: bytes) -> bool:
    try:
        environment = (process / "environ").read_bytes()  # empty for a zombie
    except OSError:
        return False  # it ended, or it is another user's
    return any(entry == mark or entry.startswith(mark + b"/") for entry in environment.split(b"\0"))


def signal_group(group: int, number: int) -> bool:
    """Return whether the process group still had someone to signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


def signal_processes(pids: Iterable[int], number: int) -> None:
    """Signal each of `pids` that still is there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_leftovers(job: str, groups: Iterable[int], grace_s: float, *, spared: Iterable[int] | None = None) -> None:
    """Ask every process of `job` and of `groups` to end, and kill what is still there after `grace_s`.

    The grace matters: Python's resource tracker ignores the asking, but removes its dead clients' shared
    memory from /dev/shm meanwhile, and ends by itself.

    Args:
        job: its name.
        groups: process groups, or sessions, of ranks; their processes are meant too.
        grace_s: how long they may take.
        spared: where this process is the launcher, those of its children that are none of the job's: all its other
            descendants are meant too.
    """
    left = _Left(job, frozenset(groups), None if spared is None else frozenset(spared))
    signal_processes(left.pids(), signal.SIGTERM)
    signal_processes(left.pids(), signal.SIGCONT)
    if not left.are_gone_within(grace_s):
        signal_processes(left.pids(), signal.SIGKILL)
        left.are_gone_within(_KILLED_S)


class _Left:
    """What a job left."""

    def __init__(self, job: str, groups: frozenset[int], spared: frozenset[int] | None) -> None:
        self._job, self._groups, self._spared = job, groups, spared

    def pids(self) -> set[int]:
        found = set(job_processes(self._job))
        if self._groups:
            found |= {each.pid for each in _processes() if {each.group, each.session} & self._groups}
        if self._spared is not None:
            reap_adopted(self._spared)
            found |= set(descendants(os.getpid(), self._spared))
        return found - {os.getpid()}

    def are_gone_within(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        pause_s = _FIRST_PAUSE_S
        while self.pids():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int
    session: int


def _processes() -> Iterator[_Process]:
    """Yield every process that is more than a zombie, which only its parent can remove."""
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            state, *numbers = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it ended meanwhile
        if state not in _ZOMBIE_STATES:
            yield _Process(int(stat.parent.name), state, *map(int, numbers))


def descendants(ancestor: int, spared: Iterable[int] = ()) -> list[int]:
    """Return the living processes below `ancestor`; not `spared`, nor what shares its session, nor what is below them.

    What is in its session was there before the ranks, which have sessions of their own.
    """
    children: dict[int, list[_Process]] = {}
    own = os.getsid(ancestor)
    for each in _processes():
        children.setdefault(each.parent, []).append(each)
    found: list[int] = []
    left = [each for each in children.get(ancestor, ()) if each.pid not in set(spared) and each.session != own]
    while left:
        each = left.pop()
        found.append(each.pid)
        left += children.get(each.pid, ())
    return found


def children_here() -> list[int]:
    """Return this process's children, zombies too."""
    path = _PROC / "self" / "task" / str(os.getpid()) / "children"
    with contextlib.suppress(OSError):
        return [int(pid) for pid in path.read_text(encoding="ascii").split()]
    return []


def reap_adopted(spared: Iterable[int]) -> None:
    """Remove the zombies among the processes that this one has adopted: all its children but `spared`."""
    for pid in set(children_here()) - set(spared):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def adopt_orphans(*, on: bool) -> None:
    """Have orphans among this process's descendants become its children, or init's again."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
