"""The study, on the rank that holds it: who runs which trial, and what the sampler and the pruner say.

Ranks are assigned greedily and in order: the next trial begins as soon as enough ranks are free, and no later trial
overtakes it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from multiring._limits.processes import start_thread
from multiring.trials.messages import (
    Message,
    ObjectiveOutcome,
    PruneAnswer,
    PruneQuestion,
    RankLoss,
    StudyEnd,
    TrialAssignment,
    TrialReport,
    TrialStop,
)
from multiring.trials.plan import StudyPlan
from multiring.trials.results import StudyResult, TrialResult
from multiring.trials.storage import INTERRUPTED, RANKS, REASON

if TYPE_CHECKING:
    from optuna.trial import Trial as OptunaTrial

_log = logging.getLogger("multiring")
_PRUNED_S = 10.0  # how long the other ranks of a trial may take to end it after one of them was pruned
_SLOW_S = 60.0  # a warning names a rank that has not ended its trial this long after it was told to
_SAVE_S, _INTERRUPTED_SAVE_S = 60.0, 5.0  # how long the end of a study waits for its storage


class SendsMessages(Protocol):
    """What carries a study's messages to the ranks."""

    def send(self, to: int, message: Message) -> None:
        """Send a message to a rank."""


@dataclass(kw_only=True)
class RunningTrial:
    """A trial that ranks run now."""

    trial: "OptunaTrial"
    ranks: tuple[int, ...]
    began_s: float
    until_s: float  # when its time is over
    outcomes: dict[int, ObjectiveOutcome] = field(default_factory=dict)  # by rank
    why: str = ""  # why it was told to end
    is_told: bool = False
    is_pruned: bool = False  # the pruner has ended it; its ranks may not know yet


class StudyHolder:
    """Runs a study on a thread of its own.

    Args:
        plan: what to run.
        messages: to and from all ranks.
        show: takes a line about each trial that has ended. By default it is logged.
    """

    def __init__(self, plan: StudyPlan, messages: SendsMessages, show: Callable[[str], None] | None = None) -> None:
        self._plan, self._messages = plan, messages
        self._show = show or (lambda text: _log.info("trials: %s", text))
        self._came: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._free = {rank for ranks in plan.hosts for rank in ranks}
        self._size = len(self._free)
        self._running: dict[int, RunningTrial] = {}
        self._over: dict[int, list[int]] = {rank: [] for rank in self._free}  # assignments to forget, by rank
        self._waiting: tuple[OptunaTrial, int] | None = None  # the next trial, and the ranks that it needs
        self._left = max(0, plan.trials - self._counted())
        # Samplers that have tried everything call it. Optuna's own is for its `optimize`.
        plan.study.stop = self._ask_no_more  # type: ignore[method-assign]
        self._serial = 0
        self._began_s = time.monotonic()
        self._times: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        self._has_warned = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring study", daemon=True)

    def _counted(self) -> int:
        """Return how many trials are over and were not interrupted."""
        trials = self._plan.study.get_trials(deepcopy=False)
        return sum(each.state.is_finished() and each.user_attrs.get(REASON) != INTERRUPTED for each in trials)

    def _ask_no_more(self) -> None:
        self._left = 0

    def start(self) -> None:
        """Start the study."""
        if self._plan.writer is not None:
            self._plan.writer.start()
        self._began_s = time.monotonic()
        start_thread(self._thread, "rank 0 cannot start the thread that holds the study")

    def receive(self, sender: int, message: Message) -> None:
        """Take a message. The call does not block."""
        self._came.put((sender, message))

    def close(self, *, is_interrupted: bool) -> StudyResult:
        """End the study, wait for its storage, and return what it has found."""
        self._is_over.set()
        self._came.put((0, None))
        if self._thread.ident is not None:  # otherwise a rank was lost before the study began
            self._thread.join(_INTERRUPTED_SAVE_S)
        writer, unsaved = self._plan.writer, 0
        if writer is not None:
            unsaved = writer.close(_INTERRUPTED_SAVE_S if is_interrupted else _SAVE_S)
            if unsaved:
                _log.warning("trials: %d trials are not in the storage as they are in the result", unsaved)
        return self._result(unsaved)

    # ---- on the thread ----

    def _run(self) -> None:
        error = ""
        try:
            self._assign()
            while self._running and not self._is_over.is_set():
                self._take()
                self._mind_times()
                self._assign()
        except Exception as found:  # noqa: BLE001 -- of a sampler, of a pruner, or of messages: all ranks must hear of it
            _log.exception("trials: the study cannot go on")
            error = f"{type(found).__name__}: {found}"
        if self._is_over.is_set():
            return
        for serial in list(self._running):
            self._stop(serial, "the study cannot go on")
        for rank in range(self._size):
            self._messages.send(rank, StudyEnd(error))

    def _take(self) -> None:
        """Wait for a message, or for the next time limit, and handle what has come."""
        next_s = min((each.until_s for each in self._running.values()), default=0.0) - time.monotonic()
        try:
            sender, message = self._came.get(timeout=min(1.0, max(0.0, next_s)))
        except queue.Empty:
            return
        if isinstance(message, RankLoss):
            self._is_over.set()  # each rank has heard of it itself
            return
        running = self._running.get(getattr(message, "serial", -1))
        if running is None or sender not in running.ranks:
            return
        if isinstance(message, TrialReport):
            if not running.is_pruned:
                running.trial.report(message.value, message.step)
                self._note(running.trial.number)
        elif isinstance(message, PruneQuestion):
            prunes = running.is_pruned or running.trial.should_prune()
            running.is_pruned = prunes and message.ends
            answer = PruneAnswer(serial=message.serial, question=message.question, step=message.step, prunes=prunes)
            for rank in running.ranks:
                self._messages.send(rank, answer)
        elif isinstance(message, ObjectiveOutcome):
            self._end_on(message.serial, running, sender, message)

    def _end_on(self, serial: int, running: RunningTrial, rank: int, outcome: ObjectiveOutcome) -> None:
        """Note that a trial has ended on one of its ranks; finish it after the last one."""
        running.outcomes[rank] = outcome
        if len(running.outcomes) == len(running.ranks):
            del self._running[serial]
            for each in running.ranks:
                self._over[each].append(serial)
            self._finish(running)
        elif outcome.state == "failed":
            self._stop(serial, f"rank {rank}: {outcome.reason}")
        elif outcome.state == "pruned":
            running.until_s = min(running.until_s, time.monotonic() + _PRUNED_S)

    def _mind_times(self) -> None:
        """Stop the trials whose time is over."""
        for serial, running in list(self._running.items()):
            if time.monotonic() < running.until_s:
                continue
            late = sorted(set(running.ranks) - set(running.outcomes))
            if running.is_told:
                _log.warning("trials: trial %d has not ended on ranks %s yet", running.trial.number, late)
                running.until_s = time.monotonic() + _SLOW_S
            elif any(each.state == "pruned" for each in running.outcomes.values()):
                _log.warning(
                    "trials: trial %d was pruned, but not on ranks %s; call should_prune on every rank of a trial",
                    running.trial.number,
                    late,
                )
                self._stop(serial, "it was pruned")
            else:
                running.why = f"its time limit of {self._plan.time_limit_s:g} s has passed"
                self._stop(serial, running.why)

    def _stop(self, serial: int, why: str) -> None:
        """Tell the ranks of a trial to end it."""
        running = self._running[serial]
        if running.is_told:
            return
        running.is_told, running.until_s = True, time.monotonic() + _SLOW_S
        for rank in set(running.ranks) - set(running.outcomes):
            self._messages.send(rank, TrialStop(serial=serial, why=why))

    def _finish(self, running: RunningTrial) -> None:
        """Tell the study how a trial has ended, and free its ranks."""
        from optuna.trial import TrialState  # noqa: PLC0415 -- as in space.py

        number, first = running.trial.number, running.outcomes[running.ranks[0]]
        failed = {rank: each for rank, each in sorted(running.outcomes.items()) if each.state == "failed"}
        reason = running.why or next((f"rank {rank}: {each.reason}" for rank, each in failed.items()), "")
        is_pruned = any(each.state == "pruned" for each in running.outcomes.values())
        if not reason and first.state == "stopped" and not is_pruned:
            reason = first.reason
        running.trial.set_user_attr(RANKS, list(running.ranks))
        if reason:
            running.trial.set_user_attr(REASON, reason)
            self._plan.study.tell(number, state=TrialState.FAIL)
        elif first.state == "complete":
            self._plan.study.tell(number, first.value)
        else:
            self._plan.study.tell(number, state=TrialState.PRUNED)
        self._warn_of_silence(number, first)
        now_s = time.monotonic() - self._began_s
        self._times[number] = running.began_s - self._began_s, now_s, running.ranks
        shown = first.state if first.value is None else f"complete {first.value}"
        shown = f"failed ({reason})" if reason else shown
        self._show(f"trial {number} on ranks {list(running.ranks)}: {shown}, {running.trial.params}")
        self._note(number)
        self._free.update(running.ranks)

    def _warn_of_silence(self, number: int, first: ObjectiveOutcome) -> None:
        """Warn once if there is a pruner, and a trial has ended without a report."""
        import optuna  # noqa: PLC0415 -- as in space.py

        if (
            first.state != "complete"
            or self._has_warned
            or isinstance(self._plan.study.pruner, optuna.pruners.NopPruner)
        ):
            return
        if not self._plan.study.get_trials(deepcopy=False)[number].intermediate_values:
            self._has_warned = True
            _log.warning(
                "trials: trial %d has reported nothing, so the pruner cannot judge it: call trial.report", number
            )

    def _assign(self) -> None:
        """Give free ranks their next trials."""
        while not self._is_over.is_set():
            if self._waiting is None:
                if self._left == 0 or len(self._free) < (self._plan.ranks_per_trial or 1):
                    return
                self._waiting = self._asked()
                if self._waiting is None:
                    continue
            trial, count = self._waiting
            if len(self._free) < count:
                return
            self._waiting = None
            ranks = chosen_ranks(self._free, count, self._plan.hosts)
            self._free.difference_update(ranks)
            now_s, self._serial = time.monotonic(), self._serial + 1
            self._running[self._serial] = RunningTrial(
                trial=trial, ranks=ranks, began_s=now_s, until_s=now_s + self._plan.time_limit_s
            )
            assignment = TrialAssignment(
                serial=self._serial, number=trial.number, params=dict(trial.params), ranks=ranks
            )
            for rank in ranks:
                over, self._over[rank] = tuple(self._over[rank]), []
                self._messages.send(rank, replace(assignment, over=over))

    def _asked(self) -> "tuple[OptunaTrial, int] | None":
        """Return the next trial and its number of ranks; None if that number is wrong, and the trial has failed."""
        from optuna.trial import TrialState  # noqa: PLC0415 -- as in space.py

        self._left -= 1
        trial = self._plan.study.ask(self._plan.space)
        self._note(trial.number)
        try:
            count = self._plan.ranks_of(dict(trial.params))
            reason = f"ranks_per_trial gave {count!r}; want a whole number, 1 to {self._size}"
        except Exception as error:  # noqa: BLE001 -- of the caller's function
            count, reason = None, f"ranks_per_trial: {type(error).__name__}: {error}"
        if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= self._size:
            return trial, count
        trial.set_user_attr(REASON, reason)
        self._plan.study.tell(trial.number, state=TrialState.FAIL)
        _log.warning("trials: trial %d failed: %s", trial.number, reason)
        self._note(trial.number)
        return None

    def _note(self, number: int) -> None:
        if self._plan.writer is not None:
            self._plan.writer.note(number)

    def _result(self, unsaved: int) -> StudyResult:
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        found = []
        for each in self._plan.study.get_trials(deepcopy=False):
            if each.state.name not in names:
                continue
            began_s, ended_s, ranks = self._times.get(each.number, (0.0, 0.0, ()))
            found.append(
                TrialResult(
                    number=each.number,
                    params=dict(each.params),
                    state=names[each.state.name],
                    value=each.values[0] if each.values else None,
                    reason=each.user_attrs.get(REASON, ""),
                    ranks=ranks,
                    began_s=began_s,
                    ended_s=ended_s,
                    reports=dict(each.intermediate_values),
                )
            )
        study = self._plan.study
        return StudyResult(
            name=study.study_name, direction=study.direction.name.lower(), trials=tuple(found), unsaved=unsaved
        )


def chosen_ranks(free: set[int], count: int, hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return `count` of the free ranks: of the fullest host that they fill, or else of as few hosts as possible."""
    by_host = [[rank for rank in ranks if rank in free] for ranks in hosts]
    fitting = [ranks for ranks in by_host if len(ranks) >= count]
    if fitting:
        return tuple(min(fitting, key=len)[:count])
    ordered = [rank for ranks in sorted(by_host, key=len, reverse=True) for rank in ranks]
    return tuple(sorted(ordered[:count]))
