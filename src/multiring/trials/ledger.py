"""What the rank that holds a study writes down: in Optuna's study, in its storage, and in the copies on other ranks."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiring.trials.copies import StudyCopies
from multiring.trials.messages import TrialTimes
from multiring.trials.plan import StudyPlan
from multiring.trials.results import StudyResult, TrialResult
from multiring.trials.storage import RANKS, REASON, is_interrupted

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_log = logging.getLogger("multiring")
_LOST = "interrupted: the rank that held the study was lost when the trial began; another trial takes its place"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTrial:
    """A trial of the study that is not over."""

    number: int
    params: dict[str, Any]


class StudyLedger:
    """Asks Optuna, and tells it what has happened. All calls are made on one thread.

    Args:
        plan: what to run.
        copies: the copies of the study on other ranks; None if a lost rank ends the job.
        began_s: when the study began, by `time.monotonic`.
        times: of the trials that are over.
    """

    def __init__(
        self, plan: StudyPlan, copies: StudyCopies | None, began_s: float, times: Mapping[int, TrialTimes]
    ) -> None:
        self._plan, self._study, self._copies = plan, plan.study, copies
        self._storage = plan.study._storage  # noqa: SLF001 -- reports of a trial without Optuna's Trial
        self.began_s = began_s
        self.times = dict(times)
        self._has_warned = False

    def counted(self) -> int:
        """Return how many trials are over and were not interrupted."""
        trials = self._study.get_trials(deepcopy=False)
        return sum(each.state.is_finished() and not is_interrupted(each) for each in trials)

    def unfinished(self) -> list[AskedTrial]:
        """Return the trials that have begun and are not over."""
        found = [each for each in self._study.get_trials(deepcopy=False) if each.state.name == "RUNNING"]
        return [AskedTrial(number=each.number, params=dict(each.params)) for each in found]

    def is_over(self, number: int) -> bool:
        """Return whether a trial is over; False if it is unknown."""
        trials = self._study.get_trials(deepcopy=False)
        return number < len(trials) and trials[number].state.is_finished()

    def ask(self) -> AskedTrial:
        """Return the next trial."""
        trial = self._study.ask(self._plan.space)
        if self._copies is not None:
            self._copies.note_asked(self._frozen(trial.number))
        self._note(trial.number)
        return AskedTrial(number=trial.number, params=dict(trial.params))

    def adopt(self, number: int, params: dict[str, Any]) -> AskedTrial:
        """Return a trial that the former holder has asked for; its parameters may be missing in the copy."""
        from optuna.trial import TrialState, create_trial  # noqa: PLC0415 -- as in space.py

        study_id = self._study._study_id  # noqa: SLF001
        while (known := len(self._study.get_trials(deepcopy=False))) <= number:
            spaces = {name: self._plan.space[name] for name in params if known == number}
            found = create_trial(
                state=TrialState.RUNNING if known == number else TrialState.FAIL,
                params={name: params[name] for name in spaces},
                distributions=spaces,
                user_attrs={} if known == number else {REASON: _LOST},
            )
            self._storage.create_new_trial(study_id, template_trial=found)
            self._note(known)
            if self._copies is not None:
                self._copies.note_trial(self._frozen(known))
        if self._frozen(number).state is TrialState.WAITING:
            for name, value in params.items():
                inner = self._plan.space[name].to_internal_repr(value)
                self._storage.set_trial_param(self._id(number), name, inner, self._plan.space[name])
            self._storage.set_trial_state_values(self._id(number), TrialState.RUNNING)
        return AskedTrial(number=number, params=params)

    def report(self, number: int, value: float, step: int) -> None:
        """Note a report. One that is known already changes nothing."""
        if step in self._frozen(number).intermediate_values:
            return
        self._storage.set_trial_intermediate_value(self._id(number), step, value)
        self._note(number)
        if self._copies is not None:
            self._copies.note_report(number, step, value)

    def should_prune(self, number: int) -> bool:
        """Ask the pruner."""
        before = dict(self._frozen(number).system_attrs)
        prunes = self._study.pruner.prune(self._study, self._storage.get_trial(self._id(number)))
        now = self._frozen(number)
        if self._copies is not None and now.system_attrs != before:
            self._copies.note_trial(now)
        return bool(prunes)

    def fail(self, number: int, reason: str) -> None:
        """Tell the study that a trial has failed that no rank has run."""
        from optuna.trial import TrialState  # noqa: PLC0415 -- as in space.py

        self._storage.set_trial_user_attr(self._id(number), REASON, reason)
        self._study.tell(number, state=TrialState.FAIL)
        _log.warning("trials: trial %d failed: %s", number, reason)
        self._note(number)
        if self._copies is not None:
            self._copies.note_trial(self._frozen(number))

    def end(self, trial: AskedTrial, ranks: tuple[int, ...], began_s: float, end: "TrialEnd") -> None:
        """Tell the study how a trial has ended on its ranks."""
        from optuna.trial import TrialState  # noqa: PLC0415 -- as in space.py

        number = trial.number
        self._storage.set_trial_user_attr(self._id(number), RANKS, list(ranks))
        if end.reason:
            self._storage.set_trial_user_attr(self._id(number), REASON, end.reason)
            self._study.tell(number, state=TrialState.FAIL)
        elif end.value is not None:
            self._study.tell(number, end.value)
        else:
            self._study.tell(number, state=TrialState.PRUNED)
        self._warn_of_silence(number, end)
        self.times[number] = TrialTimes(began_s - self.began_s, time.monotonic() - self.began_s, ranks)
        self._note(number)
        if self._copies is not None:
            self._copies.note_trial(self._frozen(number), self.times[number])

    def _warn_of_silence(self, number: int, end: "TrialEnd") -> None:
        """Warn once if there is a pruner, and a trial has ended without a report."""
        import optuna  # noqa: PLC0415 -- as in space.py

        if end.value is None or self._has_warned or isinstance(self._study.pruner, optuna.pruners.NopPruner):
            return
        if not self._frozen(number).intermediate_values:
            self._has_warned = True
            _log.warning(
                "trials: trial %d has reported nothing, so the pruner cannot judge it: call trial.report", number
            )

    def _id(self, number: int) -> int:
        return self._frozen(number)._trial_id  # noqa: SLF001

    def _frozen(self, number: int) -> "FrozenTrial":
        return self._study.get_trials(deepcopy=False)[number]

    def _note(self, number: int) -> None:
        if self._plan.writer is not None:
            self._plan.writer.note(number)

    def result(self, unsaved: int) -> StudyResult:
        """Return what the study has found.

        Args:
            unsaved: the number of trials that the storage does not have as they are here.
        """
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        found = []
        for each in self._study.get_trials(deepcopy=False):
            if each.state.name not in names:
                continue
            times = self.times.get(each.number, TrialTimes(0.0, 0.0, ()))
            found.append(
                TrialResult(
                    number=each.number,
                    params=dict(each.params),
                    state=names[each.state.name],
                    value=each.values[0] if each.values else None,
                    reason=str(each.user_attrs.get(REASON, "")),
                    ranks=times.ranks,
                    began_s=times.began_s,
                    ended_s=times.ended_s,
                    reports=dict(each.intermediate_values),
                )
            )
        study = self._study
        return StudyResult(
            name=study.study_name, direction=study.direction.name.lower(), trials=tuple(found), unsaved=unsaved
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEnd:
    """How a trial has ended: with a value, or with the reason of its failure; with neither it was pruned."""

    value: float | None = None
    reason: str = ""
