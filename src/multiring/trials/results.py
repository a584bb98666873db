"""What a study has found: the same values on every rank."""

from dataclasses import dataclass
from typing import Any

from multiring.errors import MultiringError


class NoTrialError(MultiringError, ValueError):
    """No trial of the study has a value; the text has the first trial's reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """One trial of a study."""

    number: int  # its number in the study, as Optuna counts
    params: dict[str, Any]
    state: str  # "complete", "pruned" or "failed"
    value: float | None  # what the objective returned; the last report if it was pruned; None if it failed
    reason: str  # why it failed, as in "rank 3: ValueError: no such optimizer", or ""
    ranks: tuple[int, ...]  # the ranks that ran it, in this job; empty for trials of earlier jobs
    began_s: float  # when its ranks got it, in seconds since the study began in this job
    ended_s: float  # when the last of its ranks had ended it
    reports: dict[int, float]  # the reported values by step


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """The trials of a study, those of earlier jobs included."""

    name: str
    direction: str  # "minimize" or "maximize"
    trials: tuple[TrialResult, ...]
    unsaved: int  # the number of trials that the storage does not have as they are here; 0 without a storage

    @property
    def best(self) -> TrialResult:
        """The complete trial with the best value; of equal ones, the first.

        Raises:
            NoTrialError: no trial is complete.
        """
        complete = [each for each in self.trials if each.state == "complete"]
        if not complete:
            first = [f"trial {each.number}: {each.reason or each.state}" for each in self.trials[:1]]
            raise NoTrialError(
                f"study {self.name!r}: none of {len(self.trials)} trials is complete ({''.join(first) or 'none ran'}); "
                "read the reasons in `trials`"
            )
        sign = 1 if self.direction == "minimize" else -1
        return min(complete, key=lambda each: sign * (each.value or 0.0))
