"""What the ranks of a study know of its trials, put together by the rank that holds the study from now on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from multiring.trials.messages import (
    AssignmentRecord,
    Message,
    ObjectiveOutcome,
    PruneAnswer,
    PruneQuestion,
    RankStanding,
    TrialAssignment,
    TrialReport,
)

_RECORDS = 4  # a rank's last trials; what came before them has been copied long ago


@dataclass(slots=True)
class OwnRecord:
    """A trial that this rank has got."""

    assignment: TrialAssignment
    began_s: float  # by `time.monotonic`
    reports: list[TrialReport] = field(default_factory=list)
    questions: list[PruneQuestion] = field(default_factory=list)
    answers: dict[int, PruneAnswer] = field(default_factory=dict)
    outcome: ObjectiveOutcome | None = None


class OwnRecords:
    """The last trials of this rank."""

    def __init__(self) -> None:
        self._records: dict[int, OwnRecord] = {}  # by serial, in the order in which they came

    def begin(self, assignment: TrialAssignment, now_s: float) -> None:
        """Note a new trial, and forget the oldest one."""
        self._records[assignment.serial] = OwnRecord(assignment, now_s)
        while len(self._records) > _RECORDS:
            del self._records[next(iter(self._records))]

    def knows(self, serial: int) -> bool:
        """Return whether the trial is one of the last ones."""
        return serial in self._records

    def note(self, message: Message) -> None:
        """Note what this rank says or hears of a trial."""
        record = self._records.get(message.serial)
        if record is None:
            return
        if isinstance(message, TrialReport):
            record.reports.append(message)
        elif isinstance(message, PruneQuestion):
            record.questions.append(message)
        elif isinstance(message, PruneAnswer):
            record.answers[message.question] = message
        elif isinstance(message, ObjectiveOutcome):
            record.outcome = message

    def standing(self, now_s: float) -> RankStanding:
        """Return what this rank knows."""
        return RankStanding(
            tuple(
                AssignmentRecord(
                    assignment=each.assignment,
                    age_s=now_s - each.began_s,
                    reports=tuple(each.reports),
                    questions=tuple(each.questions),
                    answers=tuple(each.answers.values()),
                    outcome=each.outcome,
                )
                for each in self._records.values()
            )
        )


@dataclass(slots=True)
class KnownTrial:
    """A trial that ranks have got, as all of them know it."""

    assignment: TrialAssignment
    records: dict[int, AssignmentRecord] = field(default_factory=dict)  # by rank; ranks that did not get it have none

    @property
    def age_s(self) -> float:
        """The seconds since the first of its ranks got it."""
        return max((each.age_s for each in self.records.values()), default=0.0)

    def missing_answers(self) -> Iterator[tuple[int, PruneAnswer]]:
        """Yield each answer with the rank that has not got it."""
        for question, answer in sorted(self._answers().items()):
            for rank, record in self.records.items():
                if question not in {each.question for each in record.answers}:
                    yield rank, answer

    def told(self) -> Iterator[tuple[int, Message]]:
        """Yield what the ranks have told the lost holder, with the sender: reports, open questions, and ends."""
        answered = self._answers()
        for rank, record in self.records.items():
            yield from ((rank, each) for each in record.reports)
            yield from ((rank, each) for each in record.questions if each.question not in answered)
        for rank, record in self.records.items():
            if record.outcome is not None:
                yield rank, record.outcome

    def _answers(self) -> dict[int, PruneAnswer]:
        return {each.question: each for record in self.records.values() for each in record.answers}


def merged(assigned: Mapping[int, TrialAssignment], standings: Mapping[int, RankStanding]) -> dict[int, KnownTrial]:
    """Return the trials that a copy of the study, or the rank itself, says that ranks have got; by serial, in order."""
    found = {serial: KnownTrial(each) for serial, each in assigned.items()}
    for rank, standing in standings.items():
        for record in standing.records:
            serial = record.assignment.serial
            found.setdefault(serial, KnownTrial(record.assignment)).records[rank] = record
    return dict(sorted(found.items()))
