"""The study, on the rank that holds it: who runs which trial, and what the sampler and the pruner say.

Ranks are assigned greedily and in order: the next trial begins as soon as enough ranks are free, and no later trial
overtakes it.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from multiring._arguments import whole
from multiring._limits.processes import start_thread
from multiring.errors import StateError
from multiring.trials.copies import HOLDERS, CopiedStudy, SendsMessages, StudyCopies, holding_order
from multiring.trials.ledger import AskedTrial, StudyLedger, TrialEnd
from multiring.trials.messages import (
    LostRanks,
    Message,
    ObjectiveOutcome,
    PruneAnswer,
    PruneQuestion,
    RankLoss,
    RankStanding,
    StudyEnd,
    TrialAssignment,
    TrialReport,
    TrialStop,
)
from multiring.trials.plan import StudyPlan
from multiring.trials.results import StudyResult
from multiring.trials.standings import KnownTrial, merged

_log = logging.getLogger("multiring")
_PRUNED_S = 10.0  # how long the other ranks of a trial may take to end it after one of them was pruned
_SLOW_S = 60.0  # a warning names a rank that has not ended its trial this long after it was told to
_SAVE_S, _INTERRUPTED_SAVE_S = 60.0, 5.0  # how long the end of a study waits for its storage


@dataclass(kw_only=True)
class RunningTrial:
    """A trial that ranks run now."""

    trial: AskedTrial
    ranks: tuple[int, ...]
    began_s: float
    until_s: float  # when its time is over
    outcomes: dict[int, ObjectiveOutcome] = field(default_factory=dict)  # by rank
    why: str = ""  # why it was told to end
    is_told: bool = False
    is_pruned: bool = False  # the pruner has ended it; its ranks may not know yet

    def end(self) -> tuple[TrialEnd, str]:
        """Return how the trial has ended, once all its ranks have told, and the words for it."""
        first = self.outcomes[self.ranks[0]]
        failed = {rank: each for rank, each in sorted(self.outcomes.items()) if each.state == "failed"}
        reason = self.why or next((f"rank {rank}: {each.reason}" for rank, each in failed.items()), "")
        is_pruned = any(each.state == "pruned" for each in self.outcomes.values())
        if not reason and first.state == "stopped" and not is_pruned:
            reason = first.reason
        shown = first.state if first.value is None else f"complete {first.value}"
        end = TrialEnd(value=first.value if first.state == "complete" else None, reason=reason)
        return end, f"failed ({reason})" if reason else shown


class StudyHolder:
    """Runs a study on a thread of its own.

    Args:
        plan: what to run.
        messages: to and from all ranks.
        show: takes a line about each trial that has ended. By default it is logged.
        moves: whether the study moves to another rank if this one is lost. Otherwise a lost rank ends it.
    """

    def __init__(
        self,
        plan: StudyPlan,
        messages: SendsMessages,
        show: Callable[[str], None] | None = None,
        *,
        moves: bool = False,
    ) -> None:
        self._plan, self._messages = plan, messages
        self._show = show or (lambda text: _log.info("trials: %s", text))
        self._came: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._free = {rank for ranks in plan.hosts for rank in ranks}
        self._live = set(self._free)
        self._order = holding_order(plan.hosts)
        self._running: dict[int, RunningTrial] = {}
        self._over: dict[int, list[int]] = {rank: [] for rank in self._free}  # assignments to forget, by rank
        self._waiting: deque[tuple[AskedTrial, int]] = deque()  # the next trials, and how many ranks they need
        self._copies = StudyCopies(plan, messages) if moves else None
        self._ledger = StudyLedger(plan, self._copies, time.monotonic(), {})
        self._former: CopiedStudy | None = None  # if another rank has held the study until now
        self._left = max(0, plan.trials - self._ledger.counted())
        # Samplers that have tried everything call it. Optuna's own is for its `optimize`.
        plan.study.stop = self._ask_no_more  # type: ignore[method-assign]
        self._serial = 0
        self._found: StudyResult | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring study", daemon=True)

    def take_over(self, former: CopiedStudy, lost: Mapping[int, str], began_s: float) -> None:
        """Go on with the study of a lost rank, in place of `start`. The ranks that are left send their standings.

        Args:
            former: the copy of the study.
            lost: why each lost rank was lost.
            began_s: when the study began, by `time.monotonic`.
        """
        self._former = former
        self._ledger = StudyLedger(self._plan, self._copies, began_s, former.times)
        self._came.put((0, LostRanks(ranks=lost)))
        self._start()

    def _ask_no_more(self) -> None:
        self._left = 0

    def start(self) -> None:
        """Start the study."""
        self._ledger.began_s = time.monotonic()
        self._start()

    def _start(self) -> None:
        if self._plan.writer is not None:
            self._plan.writer.start()
        start_thread(self._thread, "this rank cannot start the thread that holds the study")

    def receive(self, sender: int, message: Message) -> None:
        """Take a message. The call does not block."""
        self._came.put((sender, message))

    def close(self, *, is_interrupted: bool) -> StudyResult:
        """End the study, wait for its storage, and return what it has found."""
        self.give_up()
        if self._thread.ident is not None:  # otherwise a rank was lost before the study began
            self._thread.join(_INTERRUPTED_SAVE_S if is_interrupted else _SAVE_S)
        if self._found is None:
            self._found = self._saved(is_interrupted=is_interrupted)
        return self._found

    def give_up(self) -> None:
        """End the study without a word: every rank has heard why. The call does not block."""
        self._is_over.set()
        self._came.put((0, None))

    def _saved(self, *, is_interrupted: bool) -> StudyResult:
        """Wait for the storage, and return what the study has found."""
        writer, unsaved = self._plan.writer, 0
        if writer is not None:
            seconds = _INTERRUPTED_SAVE_S if is_interrupted else _SAVE_S
            unsaved = writer.close(seconds, is_patient=not is_interrupted)
            if unsaved:
                _log.warning("trials: %d trials are not in the storage as they are in the result", unsaved)
        return self._ledger.result(unsaved)

    # ---- on the thread ----

    def _run(self) -> None:
        error = ""
        try:
            if self._former is not None:
                self._take_up(self._former)
            if not self._is_over.is_set():
                self._keep_copies()
            self._assign()
            while self._running and not self._is_over.is_set():
                self._take()
                self._mind_times()
                self._assign()
        except Exception as found:  # noqa: BLE001 -- of a sampler, of a pruner, or of messages: all ranks must hear of it
            log_end("trials: the study cannot go on", found)
            error = f"{type(found).__name__}: {found}"
        if self._is_over.is_set():
            return
        for serial in list(self._running):
            self._stop(serial, "the study cannot go on")
        self._found = self._saved(is_interrupted=False)
        # The rank that holds the study hears of its end last: if it is lost before, another one goes on.
        lost = tuple(sorted(set(self._order) - self._live))
        for rank in reversed(self._order):
            self._messages.send(rank, StudyEnd(error, self._found, lost))

    def _take(self) -> None:
        """Wait for a message, or for the next time limit, and handle what has come."""
        next_s = min((each.until_s for each in self._running.values()), default=0.0) - time.monotonic()
        try:
            sender, message = self._came.get(timeout=min(1.0, max(0.0, next_s)))
        except queue.Empty:
            return
        self._handle(sender, message)

    def _handle(self, sender: int, message: Message) -> None:
        if isinstance(message, LostRanks):
            self._go_on_without(message.ranks)
            return
        if isinstance(message, RankLoss):
            if self._copies is None:
                self._is_over.set()  # each rank has heard of it itself
            return
        running = self._running.get(getattr(message, "serial", -1))
        if running is None or sender not in running.ranks:
            return
        number = running.trial.number
        if isinstance(message, TrialReport):
            if not running.is_pruned:
                self._ledger.report(number, message.value, message.step)
        elif isinstance(message, PruneQuestion):
            prunes = running.is_pruned or self._ledger.should_prune(number)
            running.is_pruned = prunes and message.ends
            answer = PruneAnswer(serial=message.serial, question=message.question, step=message.step, prunes=prunes)
            for rank in running.ranks:
                self._messages.send(rank, answer)
        elif isinstance(message, ObjectiveOutcome):
            self._end_on(message.serial, running, sender, message)

    # ---- lost ranks ----

    def _keep_copies(self) -> None:
        if self._copies is not None:
            live = [rank for rank in self._order if rank in self._live]
            self._copies.keep_on(live[1 : 1 + HOLDERS], self._ledger.times)

    def _go_on_without(self, lost: Mapping[int, str]) -> None:
        """End the trials of lost ranks, and give them no more."""
        self._live -= set(lost)
        self._free -= set(lost)
        if self._former is None:
            self._keep_copies()
        for serial, running in list(self._running.items()):
            for rank in set(running.ranks) & set(lost) - set(running.outcomes):
                running.why = running.why or f"rank {rank} was lost: {lost[rank]}"
                outcome = ObjectiveOutcome(serial=serial, state="failed", reason=running.why)
                self._end_on(serial, running, rank, outcome)
        for trial, count in list(self._waiting):
            if count > len(self._live):
                self._waiting.remove((trial, count))
                self._ledger.fail(trial.number, f"it wants {count} ranks, and {len(self._live)} are left")
        constant = self._plan.ranks_per_trial
        if constant is not None and constant > len(self._live):
            left = "1 rank is" if len(self._live) == 1 else f"{len(self._live)} ranks are"
            raise StateError(f"{left} left, and ranks_per_trial={constant}")

    def _take_up(self, former: CopiedStudy) -> None:
        """Go on with the study of a lost rank once all ranks that are left have sent their standings."""
        standings: dict[int, RankStanding] = {}
        later: list[tuple[int, Message]] = []
        lost: dict[int, str] = {}
        while not self._is_over.is_set() and self._live - set(standings):
            try:
                sender, message = self._came.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(message, RankStanding):
                standings[sender] = message
            elif isinstance(message, LostRanks):
                lost.update(message.ranks)
                self._live -= set(lost)
            else:
                later.append((sender, message))
        self._keep_copies()
        found = merged(former.assigned, standings)
        self._serial = max([0, *found])
        for serial, each in found.items():
            if not self._ledger.is_over(each.assignment.number):
                self._resume(serial, each)
        begun = {each.assignment.number for each in found.values()}
        unfinished = self._ledger.unfinished()
        self._left = max(0, self._plan.trials - self._ledger.counted() - len(unfinished))
        for trial in unfinished:
            if trial.number not in begun:
                self._expect(trial)
        self._former = None
        over, own = self._ledger.counted(), next(rank for rank in self._order if rank in self._live)
        _log.warning("trials: rank %d holds the study now, as the former was lost; %d trials are over", own, over)
        self._go_on_without(lost)
        for sender, message in later:
            self._handle(sender, message)

    def _resume(self, serial: int, known: KnownTrial) -> None:
        """Go on with a trial that ranks have got."""
        told, now_s = known.assignment, time.monotonic()
        self._running[serial] = RunningTrial(
            trial=self._ledger.adopt(told.number, told.params),
            ranks=told.ranks,
            began_s=now_s - known.age_s,
            until_s=now_s - known.age_s + self._plan.time_limit_s,
        )
        self._free -= set(told.ranks)
        for rank in set(told.ranks) & self._live - set(known.records):  # the message to it was lost
            self._messages.send(rank, told)
        for rank, answer in known.missing_answers():
            self._messages.send(rank, answer)
        for sender, message in known.told():
            self._handle(sender, message)

    # ---- trials ----

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
            told = f"trials: trial {running.trial.number}"
            late = sorted(set(running.ranks) - set(running.outcomes))
            if running.is_told:
                _log.warning("%s has not ended on ranks %s yet", told, late)
                running.until_s = time.monotonic() + _SLOW_S
            elif any(each.state == "pruned" for each in running.outcomes.values()):
                advice = "call should_prune on every rank of a trial"
                _log.warning("%s was pruned, but not on ranks %s; %s", told, late, advice)
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
        end, shown = running.end()
        self._ledger.end(running.trial, running.ranks, running.began_s, end)
        self._show(f"trial {running.trial.number} on ranks {list(running.ranks)}: {shown}, {running.trial.params}")
        self._free.update(set(running.ranks) & self._live)

    def _assign(self) -> None:
        """Give free ranks their next trials."""
        while not self._is_over.is_set():
            if not self._waiting:
                if self._left == 0 or len(self._free) < (self._plan.ranks_per_trial or 1):
                    return
                self._left -= 1
                self._expect(self._ledger.ask())
                continue
            trial, count = self._waiting[0]
            if len(self._free) < count:
                return
            self._waiting.popleft()
            self._begin(trial, chosen_ranks(self._free, count, self._plan.hosts))

    def _begin(self, trial: AskedTrial, ranks: tuple[int, ...]) -> None:
        self._free.difference_update(ranks)
        now_s, self._serial = time.monotonic(), self._serial + 1
        self._running[self._serial] = RunningTrial(
            trial=trial, ranks=ranks, began_s=now_s, until_s=now_s + self._plan.time_limit_s
        )
        assignment = TrialAssignment(serial=self._serial, number=trial.number, params=trial.params, ranks=ranks)
        if self._copies is not None:
            self._copies.note_assigned(assignment)
        for rank in ranks:
            over, self._over[rank] = tuple(self._over[rank]), []
            self._messages.send(rank, replace(assignment, over=over))

    def _expect(self, trial: AskedTrial) -> None:
        """Let a trial wait for free ranks. It fails if its number of ranks is wrong."""
        count = wanted_ranks(self._plan, trial, len(self._live))
        if isinstance(count, int):
            self._waiting.append((trial, count))
        else:
            self._ledger.fail(trial.number, count)


def wanted_ranks(plan: StudyPlan, trial: AskedTrial, size: int) -> int | str:
    """Return how many ranks a trial wants, or what is wrong with that number.

    Args:
        plan: has the caller's function, or number.
        trial: the trial.
        size: how many ranks there are.
    """
    try:
        count = plan.ranks_of(dict(trial.params))
    except Exception as error:  # noqa: BLE001 -- of the caller's function
        return f"ranks_per_trial: {type(error).__name__}: {error}"
    found = whole(count)
    if found is not None and 1 <= found <= size:
        return found
    return f"ranks_per_trial gave {count!r}; want a whole number, 1 to {size}"


def log_end(text: str, error: Exception) -> None:
    """Log why a study cannot go on. For a missing package one line says all; other errors have a traceback."""
    if isinstance(error, ImportError):
        _log.error("%s: %s", text, error)
    else:
        _log.error(text, exc_info=error)


def chosen_ranks(free: set[int], count: int, hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return `count` of the free ranks: of the fullest host that they fill, or else of as few hosts as possible."""
    by_host = [[rank for rank in ranks if rank in free] for ranks in hosts]
    fitting = [ranks for ranks in by_host if len(ranks) >= count]
    if fitting:
        return tuple(min(fitting, key=len)[:count])
    ordered = [rank for ranks in sorted(by_host, key=len, reverse=True) for rank in ranks]
    return tuple(sorted(ordered[:count]))
