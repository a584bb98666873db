"""Find and end what a job leaves behind: processes its ranks started, however they detached themselves.

A process of the job is known by MULTIRING_JOB in the environment it was started with, which every child
inherits through fork, exec and setsid alike. A process that was given another environment is only found
through its rank's process group.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from multiring.settings import environment_of

_PROC = Path("/proc")
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1
_ZOMBIE_STATES = ("Z", "X")
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


def end_leftovers(job: str, groups: Iterable[int], grace_s: float) -> None:
    """Ask every process of `job` and of `groups` to end, and kill what is still there after `grace_s`.

    The grace matters: Python's resource tracker ignores the asking, but removes its dead clients' shared
    memory from /dev/shm meanwhile, and ends by itself.
    """
    groups = list(groups)
    _signal_all(job, groups, signal.SIGTERM)
    if not _wait_until_gone(job, groups, grace_s):
        _signal_all(job, groups, signal.SIGKILL)
        _wait_until_gone(job, groups, _KILLED_S)


def _signal_all(job: str, groups: list[int], number: int) -> None:
    for group in groups:
        signal_group(group, number)
    signal_processes(job_processes(job), number)


def _wait_until_gone(job: str, groups: list[int], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    pause_s = _FIRST_PAUSE_S
    while job_processes(job) or _has_living(groups):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _has_living(groups: list[int]) -> bool:
    """Return whether someone in `groups` is more than a zombie, which only its parent can remove."""
    return bool(groups) and any(
        group in groups and state not in _ZOMBIE_STATES
        for state, group in map(_state_and_group, _PROC.glob("[0-9]*/stat"))
    )


def _state_and_group(stat: Path) -> tuple[str, int]:
    try:
        state, _, group = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:3]
    except OSError:
        return "X", 0  # it ended meanwhile
    return state, int(group)
