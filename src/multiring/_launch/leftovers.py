"""Find and end the processes that a job's ranks started.

Processes that detached themselves are found too.

The launcher recognises a process of the job by MULTIRING_JOB in its initial environment. Children inherit this
variable through fork, exec and setsid. A process with another environment is found as a descendant of the launcher,
which adopts orphans of its ranks (PR_SET_CHILD_SUBREAPER). If the launcher itself was killed, such a process is found
only by the process group or session of its rank.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from multiring._settings import environment_of

_PROC = Path("/proc")
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1
_ZOMBIE_STATES = ("Z", "X")
_PR_SET_CHILD_SUBREAPER = 36
_KILLED_S = 2.0  # how long a killed process may take to disappear


def job_processes(job: str, rank: int | None = None) -> list[int]:
    """Return the IDs of the running processes of `job` and of jobs started within it.

    With `rank`, only the processes of this rank. Use it where each rank of a host has a launcher of its own.
    """
    mark = _variable(job=job)
    more = None if rank is None else _variable(rank=rank)
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal() and _carries(entry, mark, more)]


def _variable(**value: object) -> bytes:
    (setting,) = environment_of(**value).items()
    return "=".join(setting).encode()


def _carries(process: Path, mark: bytes, more: bytes | None) -> bool:
    try:
        environment = (process / "environ").read_bytes().split(b"\0")  # the file is empty for a zombie
    except OSError:
        return False  # the process has ended, or belongs to another user
    is_of_job = any(entry == mark or entry.startswith(mark + b"/") for entry in environment)
    return is_of_job and (more is None or more in environment)


def signal_group(group: int, number: int) -> bool:
    """Signal a process group, and return whether it still had a process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


def signal_processes(pids: Iterable[int], number: int) -> None:
    """Send signal `number` to each of `pids`, skipping processes that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_leftovers(
    job: str,
    groups: Iterable[int],
    grace_s: float,
    *,
    spared: Iterable[int] | None = None,
    rank: int | None = None,
) -> None:
    """End every process of a job, with SIGTERM and then SIGKILL.

    Processes that still run `grace_s` after SIGTERM are killed.

    Python's resource tracker needs the grace. It ignores SIGTERM, removes the shared memory of its dead clients from
    /dev/shm, and ends by itself.

    Args:
        job: the name of the job.
        groups: process groups or sessions of ranks. Their processes are ended too.
        grace_s: seconds between SIGTERM and SIGKILL.
        spared: pass it only if this process is the launcher. It has the launcher's children that do not belong to the
            job. All other descendants of the launcher are ended too.
        rank: end the processes of this rank only. Default: of the whole job.
    """
    left = _Left(job, frozenset(groups), None if spared is None else frozenset(spared), rank)
    signal_processes(left.pids(), signal.SIGTERM)
    signal_processes(left.pids(), signal.SIGCONT)
    if not left.are_gone_within(grace_s):
        signal_processes(left.pids(), signal.SIGKILL)
        left.are_gone_within(_KILLED_S)


class _Left:
    """The remaining processes of a job."""

    def __init__(self, job: str, groups: frozenset[int], spared: frozenset[int] | None, rank: int | None) -> None:
        self._job, self._groups, self._spared, self._rank = job, groups, spared, rank

    def pids(self) -> set[int]:
        found = set(job_processes(self._job, self._rank))
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
    """Yield every process except zombies, which only their parent can remove."""
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            state, *numbers = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:4]
        except OSError:
            continue  # the process has just ended
        if state not in _ZOMBIE_STATES:
            yield _Process(int(stat.parent.name), state, *map(int, numbers))


def descendants(ancestor: int, spared: Iterable[int] = ()) -> list[int]:
    """Return the running descendants of `ancestor`, with some exceptions.

    The exceptions are the children in `spared`, the children in the session of `ancestor`, and all descendants of these
    children. Children in that session are older than the ranks, because each rank has its own session.
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
    """Return the IDs of this process's children, including zombies."""
    path = _PROC / "self" / "task" / str(os.getpid()) / "children"
    with contextlib.suppress(OSError):
        return [int(pid) for pid in path.read_text(encoding="ascii").split()]
    return []


def reap_adopted(spared: Iterable[int]) -> None:
    """Reap the zombies among this process's adopted children.

    These are all its children except `spared`.
    """
    for pid in set(children_here()) - set(spared):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def adopt_orphans(*, on: bool) -> None:
    """Make orphaned descendants children of this process, or of init again.

    `on=True` means this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
