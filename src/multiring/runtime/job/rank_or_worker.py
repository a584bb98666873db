"""Whether this process may become a rank, is a multiprocessing worker of one, or is some other process beside one."""

import os
from dataclasses import dataclass, replace
from typing import Any, final

from multiring.errors import StateError, UnsupportedError
from multiring.runtime.bootstrap.launchers import innermost, launch_key, place_told, told_by
from multiring.runtime.bootstrap.rank_process import (
    RankPosition,
    RankProcess,
    claim,
    is_worker_of,
    mark,
    marked,
    release,
)
from multiring.settings import Settings, foreign_environment, inherited_mark

_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Worker:
    """A multiprocessing worker of a rank: it knows the rank's place, and does not communicate."""

    rank: RankProcess
    place: RankPosition
    is_fork: bool = False

    def refusal(self) -> "WorkerError":
        """Return the error of what only the rank can do."""
        began = "was forked from" if self.is_fork else "was started by"
        return WorkerError(
            f"process {os.getpid()} is a multiprocessing worker that {began} rank {self.place.rank}, {self.rank}: it "
            "knows rank() and size(), and only the rank itself may communicate. Call collectives there, and give the "
            "worker their results"
        )


class WorkerError(StateError):
    """A worker of a rank did what only the rank can do."""


@final
class WorkerGroup:
    """What `init` returns in a worker: the group's numbers, and StateError for everything else."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.rank, self.size = worker.place.rank, worker.place.size

    def __getattr__(self, name: str) -> Any:
        """Refuse what a Group has; a name that none has is no attribute, so that pickle and the like work."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._worker.refusal()


class Attempt:
    """What these settings, and other launchers' variables, make of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._foreign = settings, foreign_environment()
        self._key = launch_key(settings, self._foreign)

    def worker(self) -> Worker | None:
        """Return what this process is, where it is a multiprocessing worker of a rank that left its mark."""
        rank = marked(inherited_mark(), self._key)
        return _worker_of(rank)

    def become_rank(self) -> Worker | None:
        """Make this process the rank; or return what it is, where it is a multiprocessing worker of the rank.

        Raises:
            StateError: another process is the rank, and lives.
        """
        if self._key is None:
            return None
        holder = marked(inherited_mark(), self._key) or claim(self._key)
        if holder is None:
            return None
        told = told_by(innermost(self._settings, self._foreign), self._foreign)
        if is_worker_of(holder):  # of a fork server that began before the rank joined, and left its mark
            place = holder.place or place_told(self._settings, self._foreign)
            return Worker(holder, place)
        raise StateError(
            f"process {os.getpid()} cannot join the job: {holder} is this rank, and lives; this process has "
            f"inherited its variables ({told}). Communicate in the rank itself. A program that is to be a job of its "
            "own is started by `multiring run -n 1 PROGRAM`, or another launcher"
        )

    def give_up(self) -> None:
        """Let another process become the rank: this one could not join."""
        if self._key is not None:
            release(self._key)

    def note(self, place: RankPosition) -> None:
        """Make this process, which has joined otherwise than by a launcher's variables, the rank if it can be."""
        if self._key is not None:
            claim(self._key)
        self.mark(place)

    def mark(self, place: RankPosition) -> None:
        """Let what this process starts know the rank's place."""
        if self._key is not None or place.size > 1:
            mark(self._key or "", place)


def worker_here(fork_of: RankProcess | None) -> Worker | None:
    """Return what this process is, where it is a multiprocessing worker of a rank.

    Args:
        fork_of: the rank that this process is a fork of, where it is one.
    """
    if fork_of is not None:
        worker = _worker_of(fork_of)
        return None if worker is None else replace(worker, is_fork=True)
    return None if inherited_mark() is None else Attempt(Settings.from_environment()).worker()


def _worker_of(rank: RankProcess | None) -> Worker | None:
    if rank is None or rank.place is None or not is_worker_of(rank):
        return None
    return Worker(rank, rank.place)


def refuse_other_systems(system: str, machine: str) -> None:
    """Raise UnsupportedError unless multiring runs on this system and processor."""
    if system != "Linux" or machine not in _MACHINES:
        raise UnsupportedError(f"multiring runs on Linux, x86-64 or aarch64; this is {system} on {machine}")
