"""Copies of a profiled script, which run beside it as the other ranks of its host will.

The ranks of a host share its memory bandwidth, its caches and the power of its processors, so a rank beside others
computes more slowly than one alone. The copies exchange nothing with the script or with each other. They run until the
profile is complete. Each copy has a folder, with files that the profiled script looks at:

- `ALIVE`, which the copy keeps locked until its process ends;
- `READY`, which says that the copy has made its steps to warm up.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from multiring._launch.rank_starts import dying_with

ALIVE, READY = "alive", "ready"
_LEAST_WAIT_S = 60.0  # for copies that are slower to start than the script
_PAUSE_S = 0.001
_GRACE_S = 10.0


class ScriptCopies:
    """The copies that run beside this process, which may be a copy itself."""

    def __init__(self, own: Path, beside: Sequence[Path]) -> None:
        """Hold this process's own lock until the process ends.

        Args:
            own: the folder of this process.
            beside: the folders of the copies that this process waits for; none for a copy.
        """
        self._own = own
        self._beside = beside
        self._began = time.monotonic()
        # The lock belongs to the process: children that the script forks do not keep it. It is never given back. The
        # file gets its name once it is locked, so that nobody finds it unlocked before.
        locked = own / f"{ALIVE}.new"
        fcntl.lockf(os.open(locked, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
        locked.rename(own / ALIVE)

    def meet(self) -> None:
        """Tell others that this process has warmed up, and wait until its copies have warmed up or have ended.

        A copy needs about as long as this process did, so the wait is bounded by that time and a minute.
        """
        (self._own / READY).touch()
        until = time.monotonic() + max(_LEAST_WAIT_S, time.monotonic() - self._began)
        while time.monotonic() < until and not all(map(_has_come, self._beside)):
            time.sleep(_PAUSE_S)

    def running(self) -> int:
        """Return how many copies have warmed up and still run."""
        return sum((folder / READY).exists() and not _has_ended(folder) for folder in self._beside)


def _has_come(folder: Path) -> bool:
    return (folder / READY).exists() or _has_ended(folder)


def _has_ended(folder: Path) -> bool:
    """Return whether the copy's process has started and ended."""
    try:
        with (folder / ALIVE).open("r+", encoding="ascii") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return False
    return True


@contextmanager
def running_copies(
    commands: Sequence[Sequence[str]], shares: Sequence[frozenset[int]], variables: Mapping[str, str]
) -> Iterator[None]:
    """Run each command as a job of one rank, without a terminal, until the context ends.

    Args:
        commands: the commands.
        shares: the CPUs of each.
        variables: the environment.
    """
    with ExitStack() as ends:
        for command, cpus in zip(commands, shares, strict=True):
            job = [sys.executable, "-m", "multiring", "run", "-n", "1", "--", *command]
            process = subprocess.Popen(  # noqa: S603 -- this program itself
                job,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_on(cpus, dying_with(os.getpid())),  # noqa: PLW1509 -- the command has no threads yet
            )
            ends.callback(_end, process)
        yield


def _on(cpus: frozenset[int], die_with_parent: Callable[[], None]) -> Callable[[], None]:
    def prepare() -> None:
        die_with_parent()
        os.sched_setaffinity(0, cpus)

    return prepare


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
