"""What a study has found: the same values on every rank."""

from collections.abc import Mapping
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


class NoMemberError(MultiringError, ValueError):
    """No member of the population has come to its end; the text has the first one's reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """One round of one member."""

    member: int
    round: int
    params: dict[str, Any]  # with which it trained in this round
    value: float
    source: int | None  # the member whose state it copied after the round; None if it went on with its own


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulationResult:
    """What a population has found: the same on every rank."""

    direction: str  # "minimize" or "maximize"
    rounds: tuple[RoundResult, ...]  # in the order of rounds, then of members
    failures: Mapping[int, str]  # why members did not come to their end, by member
    members: int

    @property
    def best(self) -> RoundResult:
        """The best value of the last round of all members that came to their end; of equal ones, the first.

        Its member has the trained state: `history(best.member)` tells with which parameters, round by round.

        Raises:
            NoMemberError: no member came to its end.
        """
        last = {each.member: each for each in self.rounds if each.member not in self.failures}
        values = [each for each in last.values() if each.value == each.value]
        if not values:
            why = "; ".join(f"member {member}: {reason}" for member, reason in list(self.failures.items())[:1])
            raise NoMemberError(f"none of {self.members} members has a value ({why or 'all are NaN'})")
        sign = 1 if self.direction == "minimize" else -1
        return min(values, key=lambda each: sign * each.value)

    def history(self, member: int) -> list[RoundResult]:
        """Return the rounds through which the state of a member has come, the first one first."""
        found: list[RoundResult] = []
        number = max((each.round for each in self.rounds), default=-1)
        by_place = {(each.member, each.round): each for each in self.rounds}
        while number >= 0:
            copied = by_place.get((member, number))
            if copied is not None and found and copied.source is not None:
                member = copied.source
                copied = by_place.get((member, number))
            if copied is not None:
                found.append(copied)
            number -= 1
        return found[::-1]
