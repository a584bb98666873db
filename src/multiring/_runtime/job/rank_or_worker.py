"""Decide whether this process may be a rank, is a rank's worker, or neither."""

import os
from dataclasses import dataclass, replace
from typing import Any, final

from multiring._runtime.bootstrap.launchers import innermost, launch_key, place_told, told_by
from multiring._runtime.bootstrap.rank_process import (
    RankPosition,
    RankProcess,
    claim,
    is_worker_of,
    mark,
    marked,
    release,
)
from multiring._settings import Settings, foreign_environment, inherited_mark
from multiring.errors import StateError, UnsupportedError

_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Worker:
    """A multiprocessing worker of a rank.

    A worker has the rank's numbers, but cannot communicate.
    """

    rank: RankProcess
    place: RankPosition
    is_fork: bool = False

    def refusal(self) -> "WorkerError":
        """Return the error for an operation that only the rank can do."""
        began = "was forked from" if self.is_fork else "was started by"
        return WorkerError(
            f"process {os.getpid()} is a multiprocessing worker that {began} rank {self.place.rank}, {self.rank}. A "
            "worker can call rank() and size(), but only the rank itself may communicate: call collectives in the "
            "rank, and pass their results to the worker"
        )


class WorkerError(StateError):
    """A multiprocessing worker tried an operation that only its rank can do."""


@final
class WorkerGroup:
    """The return value of `init` in a worker.

    The object has `rank` and `size`; everything else raises StateError.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.rank, self.size = worker.place.rank, worker.place.size

    def __getattr__(self, name: str) -> Any:
        """Raise the worker's error for public names.

        Private names, which pickle looks up, raise AttributeError.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._worker.refusal()


class JoinAttempt:
    """An attempt of this process to become a rank.

    The settings and launchers' variables say which rank.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._foreign = settings, foreign_environment()
        self._key = launch_key(settings, self._foreign)

    def worker(self) -> Worker | None:
        """Return this process as a Worker if it inherited the mark of its rank, else None."""
        rank = marked(inherited_mark(), self._key)
        return _worker_of(rank)

    def become_rank(self) -> Worker | None:
        """Make this process the rank.

        Returns:
            None on success; a Worker if this process is a multiprocessing worker of the rank.

        Raises:
            StateError: another living process is the rank.
        """
        if self._key is None:
            return None
        holder = marked(inherited_mark(), self._key) or claim(self._key)
        if holder is None:
            return None
        told = told_by(innermost(self._settings, self._foreign), self._foreign)
        if is_worker_of(holder):  # the worker's fork server may have started before the rank set its mark
            place = holder.place or place_told(self._settings, self._foreign)
            return Worker(holder, place)
        raise StateError(
            f"process {os.getpid()} cannot join the job: {holder} is already this rank and still runs; this process "
            f"inherited the rank's variables ({told}). Call collectives in the rank itself. To run a program as a "
            "separate job, start it with `multiring run -n 1 PROGRAM` or another launcher"
        )

    def give_up(self) -> None:
        """Release the claim, because this process could not join."""
        if self._key is not None:
            release(self._key)

    def note(self, place: RankPosition) -> None:
        """Claim the rank if no other process has claimed it, and set the mark.

        The method is for a process that has joined by `enter` or `move_on`.
        """
        if self._key is not None:
            claim(self._key)
        self.mark(place)

    def mark(self, place: RankPosition) -> None:
        """Set the mark that gives child processes the rank's numbers."""
        if self._key is not None or place.size > 1:
            mark(self._key or "", place)


def worker_here(fork_of: RankProcess | None) -> Worker | None:
    """Return this process as a Worker if it is a worker of a rank, else None.

    A worker is a process that the rank started by multiprocessing.

    Args:
        fork_of: the rank from which this process was forked, or None.
    """
    if fork_of is not None:
        worker = _worker_of(fork_of)
        return None if worker is None else replace(worker, is_fork=True)
    return None if inherited_mark() is None else JoinAttempt(Settings.from_environment()).worker()


def _worker_of(rank: RankProcess | None) -> Worker | None:
    if rank is None or rank.place is None or not is_worker_of(rank):
        return None
    return Worker(rank, rank.place)


def refuse_other_systems(system: str, machine: str) -> None:
    """Raise UnsupportedError unless multiring runs on this system and processor."""
    if system != "Linux" or machine not in _MACHINES:
        raise UnsupportedError(f"multiring runs on Linux, x86-64 or aarch64; this is {system} on {machine}")
