"""Find the failure that ended a job among the ends of its ranks.

A rank may fail only because it lost another rank. Such a failure is a consequence, and the cause may arrive later.
This module only decides: callers pass the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from multiring._launch.pickled_call import Failure, Outcome, Returned, outcome_of
from multiring.errors import LaunchError

CULPRIT_S = 5.0  # how long to wait for the cause after a consequence


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process ended without an outcome; `text` says how, such as "was killed by SIGKILL"."""

    text: str


def end_in(data: bytes) -> Outcome | Ended:
    """Return the end of a rank in bytes from `pickled_outcome`."""
    try:
        return outcome_of(data)
    except Exception as error:  # noqa: BLE001 -- unpickling can raise any exception
        return Ended(f"has ended, but its result or error cannot be unpickled here: {type(error).__name__}: {error}")


@dataclass(slots=True)
class RankEnds:
    """The ends of a job's ranks, in the order in which they arrive.

    Args:
        size: the number of ranks.
    """

    size: int
    _ends: dict[int, Outcome | Ended] = field(default_factory=dict)
    _first_s: float | None = None  # when the first failure arrived

    def add(self, rank: int, end: Outcome | Ended, now_s: float) -> None:
        """Record the end of a rank at the monotonic time `now_s`. Only a rank's first end counts."""
        if rank in self._ends:
            return
        self._ends[rank] = end
        if self._first_s is None and not isinstance(end, Returned):
            self._first_s = now_s

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed."""
        return self._first_s is not None

    @property
    def are_complete(self) -> bool:
        """Whether every rank has ended."""
        return len(self._ends) == self.size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self.size) if rank not in self._ends]

    def is_decided(self, now_s: float) -> bool:
        """Return whether a rank has failed and no better cause is to be expected."""
        if self._first_s is None:
            return False
        return self._cause() is not None or self.are_complete or now_s - self._first_s >= CULPRIT_S

    def results(self) -> list[Any]:
        """Return the values of all ranks, which have all returned."""
        values: list[Any] = []
        for rank in range(self.size):
            end = self._ends[rank]
            if not isinstance(end, Returned):
                raise self.error("the function did not return on every rank")
            values.append(end.value)
        return values

    def error(self, failed: str) -> LaunchError:
        """Return the error for a failed job. The cause's own exception is its `__cause__`, if it could be sent.

        Args:
            failed: the first words of the error.
        """
        rank, end = self._cause() or self._failures()[0]
        if isinstance(end, Ended):
            error = LaunchError(f"{failed}: rank {rank} {end.text}")
            for other, its in self._failures():
                if isinstance(its, Failure) and other != rank:
                    error = LaunchError(f"{error}\nrank {other} raised\n{its.text}")
                    break
            return error
        error = LaunchError(f"{failed}: rank {rank} raised\n{end.text}")
        error.__cause__ = end.error
        return error

    def _failures(self) -> Sequence[tuple[int, Failure | Ended]]:
        return [(rank, end) for rank, end in self._ends.items() if not isinstance(end, Returned)]

    def _cause(self) -> tuple[int, Failure | Ended] | None:
        for rank, end in self._failures():
            if isinstance(end, Ended) or not end.is_consequence:
                return rank, end
        return None
