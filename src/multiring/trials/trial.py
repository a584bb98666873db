"""A trial, as its objective sees it, and how the objective ended."""

import math
import sys
from typing import TYPE_CHECKING, Any

from multiring._arguments import shown, whole
from multiring._runtime import Group
from multiring.errors import ArgumentError, MismatchError, MultiringError, PeerLostError
from multiring.trials.messages import ObjectiveOutcome, PruneQuestion, TrialReport

if TYPE_CHECKING:
    from multiring.trials.desk import TrialDesk

MOST_STEP = 1 << 53  # storages keep no larger ones, and would take nothing of a study that has one


class TrialPruned(Exception):  # noqa: N818 -- Optuna's name
    """An objective raises it once `should_prune` has returned True. Optuna's own class is taken, too."""


class TrialStoppedError(PeerLostError):
    """The trial is over: its time limit has passed, or it has ended on another rank."""


class Trial:
    """A trial that this rank takes part in.

    `params` has the value of each parameter, and `number` is the trial's number in the study. `ranks` has the numbers
    that its ranks have outside the objective; inside, `multiring.rank()` counts from 0.
    """

    def __init__(
        self, desk: "TrialDesk", serial: int, number: int, params: dict[str, Any], ranks: tuple[int, ...], group: Group
    ) -> None:
        self.number, self.params, self.ranks = number, params, ranks
        self.group = group
        self._desk, self._serial = desk, serial
        self._steps: set[int] = set()
        self._step: int | None = None
        self._questions = 0

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value, for the pruner and for the study's page.

        Every rank of the trial may call it. The value of its first rank counts; the call does not wait.

        Args:
            value: a number. NaN is reported as it is; pruners prune such a trial.
            step: a whole number from 0 on that was not reported before, such as the epoch.

        Raises:
            ArgumentError: the value is no number, or the step is wrong. The trial fails with this reason.
            TrialStoppedError: the trial is over.
        """
        self._desk.require_running(self._serial)
        found, step = checked_report(value, step)
        if step in self._steps:
            raise ArgumentError(f"report(step={step}): want a step >= 0 that was not reported before")
        self._steps.add(step)
        self._step = step
        if self.group.rank == 0:
            self._desk.tell(TrialReport(serial=self._serial, step=step, value=found))

    def should_prune(self) -> bool:
        """Return whether the pruner gives the trial up. Then raise TrialPruned.

        Every rank of the trial must call it at the same places. All get the same answer to the same call: that of the
        study to the call of the trial's first rank.

        Raises:
            MismatchError: this rank asks after another step than the first rank. The trial fails with this reason.
            TrialStoppedError: the trial is over.
        """
        self._questions += 1
        if self.group.rank == 0:
            self._desk.tell(PruneQuestion(serial=self._serial, question=self._questions, step=self._step))
        answer = self._desk.answer(self._serial, self._questions)
        if self._step is not None and answer.step != self._step:
            own, first = self.ranks[self.group.rank], self.ranks[0]
            raise MismatchError(
                f"should_prune, call {self._questions}: rank {own} asks after step {self._step}, and rank {first} "
                f"after step {answer.step}; call report and should_prune at the same places on every rank"
            )
        return answer.prunes


def checked_report(value: Any, step: Any) -> tuple[float, int]:
    """Return the value and the step of a report.

    Raises:
        ArgumentError: the value is no number, or the step no whole number from 0 to 2**53.
    """
    found = number_in(value)
    if found is None:
        raise ArgumentError(f"report(value={value!r}): want a number")
    number = whole(step)
    if number is None or not 0 <= number <= MOST_STEP:
        raise ArgumentError(f"report(step={shown(step)}): want a whole number, 0 to 2**53")
    return found, number


def number_in(value: Any) -> float | None:
    """Return a value as a float if it is a number, or an array of one number; else None."""
    if isinstance(value, str | bytes | bool) or value is None or not _may_be_numbers(getattr(value, "dtype", None)):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)  # an error if there are several
    except (TypeError, ValueError, OverflowError, MultiringError, RuntimeError):
        return None


def _may_be_numbers(dtype: Any) -> bool:
    """Return False for an array's type that float() takes, although it is of truth values, texts, times or complex."""
    if getattr(dtype, "kind", "f") in "bcmMOSTU":  # of NumPy, and of JAX
        return False
    return not any(each in str(dtype) for each in ("bool", "complex", "string"))  # of torch and TensorFlow


def outcome_of_value(serial: int, value: Any) -> ObjectiveOutcome:
    """Return the outcome of an objective that returned `value`."""
    found = number_in(value)
    if found is None:
        shown = repr(value)[:100]
        return ObjectiveOutcome(serial=serial, state="failed", reason=f"the objective returned {shown}; want a number")
    if math.isnan(found):
        return ObjectiveOutcome(serial=serial, state="failed", reason="the objective returned NaN")
    return ObjectiveOutcome(serial=serial, state="complete", value=found)


def outcome_of_error(serial: int, error: BaseException) -> ObjectiveOutcome:
    """Return the outcome of an objective that raised `error`."""
    optuna = sys.modules.get("optuna")
    if isinstance(error, TrialPruned) or (optuna is not None and isinstance(error, optuna.TrialPruned)):
        return ObjectiveOutcome(serial=serial, state="pruned")
    text = f"{type(error).__name__}: {error}"
    # Frameworks say so by classes of their own: torch.OutOfMemoryError, TensorFlow's ResourceExhaustedError, and JAX's
    # general error with RESOURCE_EXHAUSTED in its text.
    kinds = {each.__name__ for each in type(error).__mro__}
    is_memory = kinds & {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"} or "RESOURCE_EXHAUSTED" in text
    return ObjectiveOutcome(serial=serial, state="failed", reason=f"out of memory: {text}" if is_memory else text)
