"""Grade the prediction of a step against the steps of a timeline, part by part."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring._diagnosis.recorded_steps import RecordedSteps
from multiring._simulator.step import SimulatedStep
from multiring.errors import ArgumentError

_SHARE = 0.2  # of the step: a smaller part is graded relative to the step
_FEW = 0.05  # a run's gradients may differ by this from the profile's, for padding and flags


@dataclass(frozen=True, slots=True)
class PartGrade:
    """A part of the step. Times are in seconds, and `error` is relative.

    A part that is `input` was taken from the graded run, and scores nothing: its error is None. A small part is graded
    relative to the step.
    """

    part: str
    predicted: float
    measured: float
    error: float | None
    of: str = ""  # to what the error is relative
    unit: str = "s"

    @property
    def is_input(self) -> bool:
        """Whether this was taken from the graded run."""
        return self.error is None


def grades_of(predicted: SimulatedStep, recorded: RecordedSteps, *, takes_hosts: bool) -> list[PartGrade]:
    """Return the grade of each part.

    Args:
        predicted: the prediction, made from another run's profile.
        recorded: the steps of the graded run.
        takes_hosts: whether the prediction has its hosts from the graded run, too.

    Raises:
        ArgumentError: the graded run reduces other gradients than the profile has.
    """
    ours, theirs = (sum(each.size_bytes for each in step.buckets) for step in (predicted, recorded))
    if abs(theirs - ours) > _FEW * ours:
        raise ArgumentError(
            f"a step of the timeline reduces {theirs} bytes of gradients in {len(recorded.buckets)} buckets, and a "
            f"step of the profile has {ours} bytes: want the timeline of the profiled program, on several ranks"
        )
    graded = [_taken("ranks", recorded.ranks)]
    if takes_hosts:
        graded.append(_taken("hosts", len(recorded.hosts)))
    seconds = predicted.seconds
    for part, mine, measured in (
        ("step", seconds.total, recorded.step),
        ("compute", seconds.compute, recorded.compute),
        ("waiting for slower ranks", seconds.waiting, recorded.waiting),
        ("exposed communication", seconds.exchange, recorded.exposed),
        ("update", seconds.update, recorded.update),
        ("input and other work", seconds.outside + seconds.input, recorded.outside),
        ("communication", predicted.communication_s, sum(each.seconds for each in recorded.buckets)),
    ):
        graded.append(_graded(part, mine, measured, recorded.step))
    count = len(predicted.buckets), len(recorded.buckets)
    graded.append(PartGrade("number of buckets", *count, abs(count[0] - count[1]) / count[1], "itself", ""))
    if count[0] == count[1]:
        graded += _of_buckets(predicted, recorded)
    return graded


def score_of(grades: Sequence[PartGrade]) -> float:
    """Return the mean of the errors of all parts that were predicted."""
    errors = [each.error for each in grades if each.error is not None]
    return sum(errors) / len(errors)


def _of_buckets(predicted: SimulatedStep, recorded: RecordedSteps) -> list[PartGrade]:
    found = []
    for number, (mine, other) in enumerate(zip(predicted.buckets, recorded.buckets, strict=True), 1):
        size = other.size_bytes
        error = abs(mine.size_bytes - size) / size
        found.append(PartGrade(f"bucket {number}, bytes", mine.size_bytes, size, error, "itself", "bytes"))
        found.append(_graded(f"bucket {number}", mine.end_s - mine.start_s, other.seconds, recorded.step))
    return found


def _taken(part: str, value: float) -> PartGrade:
    return PartGrade(part, value, value, None, unit="")


def _graded(part: str, predicted: float, measured: float, step: float) -> PartGrade:
    if measured < _SHARE * step:
        return PartGrade(part, predicted, measured, abs(predicted - measured) / step, "the step")
    return PartGrade(part, predicted, measured, abs(predicted - measured) / measured, "itself")
