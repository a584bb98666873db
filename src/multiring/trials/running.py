"""`run`: the loop of every rank of a study."""

import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from multiring._frontend.elastic.running import Rejoining
from multiring._frontend.lifecycle import init
from multiring._frontend.process_sets import in_part
from multiring._runtime import Group
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.job.job import current, waits_outside
from multiring._runtime.job.membership import Membership
from multiring._runtime.job.world import World
from multiring.errors import ArgumentError, MultiringError, PeerLostError, StateError
from multiring.trials.copies import HOLDERS, StudyReplica, holding_order
from multiring.trials.desk import TrialDesk
from multiring.trials.following import VoteFollower
from multiring.trials.holder import StudyHolder
from multiring.trials.messages import (
    LostRanks,
    Message,
    ObjectiveOutcome,
    PruneQuestion,
    RankLoss,
    RankStanding,
    StudyCopy,
    StudyEnd,
    TrialAssignment,
    TrialMessages,
    TrialReport,
)
from multiring.trials.plan import RanksPerTrial, StudyArguments, StudyPlan, plan_of
from multiring.trials.results import StudyResult
from multiring.trials.trial import Trial, outcome_of_error, outcome_of_value

_log = logging.getLogger("multiring")
_SETTLED_S = 120.0  # a vote takes milliseconds; the ends of those that it leaves out may take 100 s
_FROM_RANKS = (RankStanding, TrialReport, PruneQuestion, ObjectiveOutcome)


def run(  # noqa: PLR0913 -- all but two by name
    objective: Callable[[Trial], Any],
    space: Any,
    *,
    trials: int,
    ranks_per_trial: RanksPerTrial = 1,
    direction: str = "minimize",
    sampler: Any = None,
    pruner: Any = None,
    storage: Any = None,
    name: str = "study",
    time_limit_s: float | None = None,
) -> StudyResult:
    """Run a study on all ranks of the job, and return what it has found.

    Every rank calls it, and joins the job if it has not yet. The ranks are cut into groups. Each group gets a trial's
    parameters, and calls `objective`. A group whose trial ends gets the next trial at once, or its ranks go to groups
    of other sizes. The study lives in the memory of rank 0, whose arguments count; of the other ranks only `objective`
    does.

    Inside the objective, `multiring.rank()`, `size()` and the collectives of all adapters mean the trial's ranks.
    `local_rank()` and `local_size()` stay those of the whole job: choose the device by them. The value that the
    objective returns on the trial's first rank counts.

    An exception, NaN, a result that is no number, a time limit, or too little memory ends the trial as failed, with the
    reason, and the study goes on.

    Args:
        objective: called with a Trial; returns a number.
        space: by name, a list of choices, or a range {"low": 1e-5, "high": 0.1, "log": True}, or a distribution of
            Optuna. A range may have a "step"; if all its numbers are whole ones, so are its values.
        trials: the number of trials of the study. Those that `storage` already has count, apart from interrupted ones.
        ranks_per_trial: a divisor of the number of ranks; or a function of a trial's parameters, or the name of the
            parameter, that gives each trial's number of ranks, a whole number.
        direction: "minimize" or "maximize".
        sampler: a sampler of Optuna; by default Optuna's own default.
        pruner: a pruner of Optuna. By default no trial is pruned.
        storage: where the study is written, behind its back: a URL of SQLAlchemy ("sqlite:///study.db",
            "postgresql://..."), a path (.db: SQLite, else a journal), or a storage of Optuna. By default nowhere. If it
            has the study already, the study goes on: trials that were running are tried again.
        name: the study's name in the storage.
        time_limit_s: the seconds after which a trial fails. Its collectives fail then. A program that makes none gets
            KeyboardInterrupt, if it is in the main thread.

    Raises:
        ArgumentError: on every rank: an argument is wrong, the objective of any rank is no function, the storage cannot
            be opened, or it has a study of this name with another space or direction.
        ImportError: on every rank: Optuna, or a package that the sampler or the pruner needs, is not installed on rank
            0's host.
        PeerLostError: a rank died or left. The trials in flight have no result; with a storage, the next job tries them
            again.
        StateError: the sampler or the pruner raised an error, or the call is inside a trial.
    """
    wanted = StudyArguments(
        space=space,
        trials=trials,
        ranks_per_trial=ranks_per_trial,
        direction=direction,
        sampler=sampler,
        pruner=pruner,
        storage=storage,
        name=name,
        time_limit_s=time_limit_s,
    )
    start, plan = begin_together(objective, "run", lambda hosts: plan_of(wanted, hosts))
    found: StudyResult = _TrialsRun(start, wanted, plan).result()
    return found


Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class RunStart:
    """What ranks have in common when they begin a study."""

    objective: Callable[[Any], Any]
    world: World
    group: Group  # all ranks; nothing else uses it


def begin_together(
    objective: Callable[[Any], Any], call: str, plan: Callable[[Sequence[Sequence[int]]], Plan]
) -> tuple[RunStart, Plan | None]:
    """Join the job, and make the plan of a study on rank 0; return it there, and None on other ranks.

    Args:
        objective: the user's.
        call: the name of the public function, for errors.
        plan: checks rank 0's arguments; takes the ranks of each host.

    Raises:
        ArgumentError: on every rank, as `plan`; or `objective` is no function.
        StateError: the call is inside a trial.
    """
    init()
    if waits_outside():
        raise StateError(f"trials.{call}: this process would replace a lost rank, and a study takes no new ranks")
    world = current()
    if world.whole is not None:
        raise StateError(f"trials.{call}: this is a trial of another study; want the call outside the objective")
    group = world.group.twin()
    _require_functions(group, objective)
    found, refusal = None, None
    if group.rank == 0:
        try:
            found = plan(world.membership.topology.hosts)
        except Exception as error:  # noqa: BLE001 -- it is raised on every rank
            refusal = error
    _raise_everywhere(group, refusal)
    return RunStart(objective, world, group), found


def _require_functions(group: Group, objective: Any) -> None:
    """Raise ArgumentError on every rank if the objective of any rank is no function."""
    wrong = np.zeros(group.size)
    wrong[group.rank] = not callable(objective)
    group.all_reduce(wrong, label="trials")
    if wrong[group.rank]:
        raise ArgumentError(f"objective={objective!r}: want a function of a trial")
    if wrong.any():
        raise ArgumentError(f"objective: that of rank {wrong.argmax()} is no function; want one on every rank")


def _raise_everywhere(group: Group, error: Exception | None) -> None:
    """Raise rank 0's error on every rank, if it has one."""
    told = told_by_first(group, None if error is None else (isinstance(error, ImportError), str(error)))
    if error is not None and isinstance(error, MultiringError | ImportError):
        raise error
    if told is not None:
        is_import, text = told
        raise (ImportError(text) if is_import else ArgumentError(text)) from error


def told_by_first(group: Group, value: Any) -> Any:
    """Return rank 0's value on every rank."""
    data = np.frombuffer(pickle.dumps(value), np.uint8).copy()
    size = np.array([len(data)])
    group.broadcast(size, label="trials")
    if group.rank != 0:
        data = np.empty(int(size[0]), np.uint8)
    group.broadcast(data, label="trials")
    return pickle.loads(data.tobytes())  # noqa: S301 -- from rank 0, which has proved to know the job's secret


class Holder(Protocol):
    """What holds a study on one of its ranks."""

    def start(self) -> None:
        """Start the study."""

    def receive(self, sender: int, message: Message) -> None:
        """Take a message. The call does not block."""

    def give_up(self) -> None:
        """End the study without a word. The call does not block."""

    def close(self, *, is_interrupted: bool) -> Any:
        """End the study, and return what it has found."""


class StudyRun:
    """One call on this rank that runs a study, which ends if a rank is lost.

    A subclass makes the holder, on the rank that holds the study, and the trials.
    """

    def __init__(self, start: RunStart) -> None:
        self._objective, self._world, self._group = start.objective, start.world, start.group
        self._desk = TrialDesk()
        self._ends: dict[int, tuple[GenerationEnd, tuple[int, ...]]] = {}  # of trials that may still run elsewhere
        self._lost: dict[int, str] = {}  # why each lost rank was lost; ranks have their numbers at the study's start
        self._holder: Holder | None = None
        self._messages = TrialMessages(start.group, self._receive)
        self._desk.messages = self._messages

    def _receive(self, sender: int, message: Message) -> None:
        if isinstance(message, RankLoss):
            self._desk.fail(PeerLostError(f"trials: rank {message.rank} is lost: {message.why}"))
        # What ranks tell the study, and what the study tells this rank, differ by their classes.
        self._desk.receive(sender, message)
        if self._holder is not None:
            self._holder.receive(sender, message)

    def _trial(self, told: TrialAssignment, group: Group) -> Any:
        """Return what the objective gets: an object with `ranks` and `group`."""
        raise NotImplementedError

    def _ended(self, trial: Any, serial: int, value: Any) -> ObjectiveOutcome:
        """Return the outcome of an objective that has returned `value`."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Prepare for messages, before other ranks send them."""

    def _part(self) -> None:
        """Wait until all ranks have heard of the study's end: the news that one has left must not come before it."""
        self._group.barrier(label="trials")

    def _leave(self, *, is_interrupted: bool) -> None:
        """Receive nothing more."""
        del is_interrupted
        self._messages.close()

    def _settle(self) -> None:
        """After a failed operation: wait until it is known whether a rank is lost; raise an error if that ends it."""
        self._desk.require_ranks()

    def result(self) -> Any:
        """Run the trials that this rank gets; return the study's result once it is over."""
        is_interrupted = True
        try:
            self._begin()
            self._group.barrier(label="trials")  # from here on, every rank receives messages
            if self._holder is not None:
                self._holder.start()
            while isinstance(told := self._desk.next(), TrialAssignment):
                self._run(told)
            if told.error or told.result is None:
                raise StateError(f"trials: the study cannot go on: {told.error}")
            is_interrupted = False
            self._part()
        finally:
            if self._holder is not None:
                self._holder.close(is_interrupted=is_interrupted)
            self._leave(is_interrupted=is_interrupted)
        for end, ranks in self._ends.values():  # the holder has heard the end of every trial from all its ranks
            self._recycle(end, ranks)
        return told.result

    def _recycle(self, end: GenerationEnd, ranks: tuple[int, ...]) -> None:
        if not set(ranks) & set(self._lost):  # a lost rank might have been writing
            end.recycle(self._world.context)

    def _run(self, told: TrialAssignment) -> None:
        """Run the objective of a trial as a part of the job, and tell the study how it ended."""
        world = self._world
        for serial in told.over:
            if serial in self._ends:
                self._recycle(*self._ends.pop(serial))
        end = GenerationEnd(world.services.world_rank, may_end=True, recycles=True)
        self._ends[told.serial] = end, told.ranks
        membership = Membership(
            job=f"{world.membership.key}|trials {self._group.calls.id}.{told.serial}",
            number=0,
            rank=told.ranks.index(world.membership.rank),
            endpoints=tuple(world.membership.endpoints[rank] for rank in told.ranks),
            topology=world.membership.topology.restricted(told.ranks),
        )
        with in_part(membership, end) as group:
            trial = self._trial(told, group)
            outcome = self._outcome(trial, told.serial, end)
        self._desk.tell(outcome)

    def _outcome(self, trial: Any, serial: int, end: GenerationEnd) -> ObjectiveOutcome:
        self._desk.begin(serial, end)
        try:
            try:
                outcome = self._ended(trial, serial, self._objective(trial))
            finally:
                self._desk.leave()
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 -- told to the study, or raised
            outcome = self._outcome_of(error, trial, serial)
        if self._desk.why_stopped(serial) is not None and outcome.state == "failed":
            return ObjectiveOutcome(serial=serial, state="stopped", reason=self._desk.why_stopped(serial) or "")
        return outcome

    def _outcome_of(self, error: BaseException, trial: Any, serial: int) -> ObjectiveOutcome:
        """Return the outcome of an objective that raised an error; raise it if it ends the study on this rank."""
        if isinstance(error, PeerLostError):  # perhaps because a rank is lost, which may end the study
            self._settle()
            if lost := sorted(set(trial.ranks) & set(self._lost)):
                reason = f"rank {lost[0]} was lost: {self._lost[lost[0]]}"
                return ObjectiveOutcome(serial=serial, state="stopped", reason=reason)
        if self._desk.why_stopped(serial) is not None:
            return ObjectiveOutcome(serial=serial, state="stopped", reason=self._desk.why_stopped(serial) or "")
        if isinstance(error, KeyboardInterrupt):
            self._desk.require_ranks()
            raise error
        outcome = outcome_of_error(serial, error)
        if outcome.state == "failed":
            rank = trial.ranks[trial.group.rank]
            _log.warning("trials: trial %d failed on rank %d", trial.number, rank, exc_info=error)
        return outcome


class _TrialsRun(StudyRun):
    """One call of `run` on this rank. If ranks vote on who goes on, the study moves when its rank is lost."""

    _holder: StudyHolder | None

    def __init__(self, start: RunStart, wanted: StudyArguments, plan: StudyPlan | None) -> None:
        self._wanted = wanted
        self._moves = start.world.vote is not None
        self._order = holding_order(start.world.membership.topology.hosts)
        self._began_s = time.monotonic()
        self._replica = StudyReplica()
        self._end: StudyEnd | None = None
        self._lock = threading.Lock()
        self._early: list[tuple[int, Message]] = []  # what came for a holder that this rank may become
        self._follower = VoteFollower(start.world, self._go_on_without, self._fail)
        super().__init__(start)
        if plan is not None:
            self._holder = StudyHolder(plan, self._messages, moves=self._moves)

    def _trial(self, told: TrialAssignment, group: Group) -> Trial:
        return Trial(self._desk, told.serial, told.number, dict(told.params), told.ranks, group)

    def _ended(self, trial: Trial, serial: int, value: Any) -> ObjectiveOutcome:
        if trial.group.rank != 0:  # what other ranks return does not count
            return ObjectiveOutcome(serial=serial, state="complete")
        return outcome_of_value(serial, value)

    def _receive(self, sender: int, message: Message) -> None:
        if not self._moves:
            super()._receive(sender, message)
            return
        if sender in self._lost:
            return
        if isinstance(message, StudyCopy):
            self._replica.take(message)
        elif isinstance(message, RankLoss):
            self._lose(message)
        else:
            if isinstance(message, StudyEnd):
                self._end = self._end or message
            elif isinstance(message, RankStanding) and self._end is not None:
                self._spread_end()
            # What ranks tell the study, and what the study tells this rank, differ by their classes.
            self._desk.receive(sender, message)
            with self._lock:
                if self._holder is not None:
                    self._holder.receive(sender, message)
                elif isinstance(message, _FROM_RANKS):
                    self._early.append((sender, message))

    def _lose(self, message: RankLoss) -> None:
        if self._end is None:
            self._follower.lose(message.rank, message.why)
        elif message.died:
            self._spread_end()

    def _spread_end(self) -> None:
        """Tell the other ranks that the study is over: the rank that held it may have told only some of them."""
        end, ranks = self._end, [rank for rank in self._order if rank not in (self._group.rank, *self._lost)]

        def send() -> None:
            with suppress(MultiringError):  # this rank leaves, or the other one takes nothing
                for rank in ranks:
                    self._messages.send(rank, end)

        threading.Thread(target=send, name="multiring study end", daemon=True).start()

    def _fail(self, why: str) -> None:
        """End the study on this rank, as the ranks that are left cannot go on."""
        self._desk.fail(StateError(f"trials: {why}"))
        if self._holder is not None:
            self._holder.give_up()

    def _go_on_without(self, why: Mapping[int, str]) -> None:
        """Go on without lost ranks, perhaps as the rank that holds the study."""
        self._lost.update(why)
        live = [rank for rank in self._order if rank not in self._lost]
        own, holders = self._group.rank, live[: 1 + HOLDERS]
        self._messages.link(live if own in holders else holders)
        if self._end is not None:
            self._spread_end()
            return
        if own == live[0] and self._holder is None:
            self._hold()
        elif self._holder is not None:
            self._holder.receive(own, LostRanks(ranks=why))
        self._desk.move(live[0])

    def _hold(self) -> None:
        """Go on with the study from the copy of this rank."""
        try:
            former = self._replica.study(self._wanted, self._world.membership.topology.hosts)
        except StateError as error:
            self._end = StudyEnd(str(error))
            self._desk.receive(self._group.rank, self._end)
            self._spread_end()
            return
        holder = StudyHolder(former.plan, self._messages, moves=True)
        with self._lock:
            self._holder = holder
            for sender, message in self._early:
                holder.receive(sender, message)
            self._early.clear()
        holder.take_over(former, self._lost, self._began_s)

    def _begin(self) -> None:
        if self._moves:
            holders = self._order[: 1 + HOLDERS]
            self._messages.link(self._order if self._group.rank in holders else holders)
            self._follower.start()

    def _leave(self, *, is_interrupted: bool) -> None:
        """Receive nothing more.

        If ranks may be lost, this rank goes on to tell others of the study's end, until the end of its next study.
        """
        self._follower.stop()
        if is_interrupted or not self._moves:
            self._messages.close()
        else:
            self._world.job_objects.made(_LastStudy, _LastStudy).follow(self._messages)

    def _settle(self) -> None:
        self._desk.require_ranks()
        if self._moves:
            self._follower.wait_until_settled(_SETTLED_S)
            self._desk.require_ranks()

    def _part(self) -> None:
        if not self._moves:
            super()._part()
            return
        if self._end is not None:
            self._follower.wait_until_settled(_SETTLED_S, self._end.lost)
        group = self._group
        if self._follower.has_moved:
            Rejoining().join_again()
            group = current().group.twin()
        # Without it, a rank is lost now. Those that have not heard of the end yet hear of it from any other rank.
        with suppress(PeerLostError):
            group.barrier(label="trials")


class _LastStudy:
    """The messages of the last study in this job."""

    def __init__(self) -> None:
        self._messages: TrialMessages | None = None

    def follow(self, messages: TrialMessages) -> None:
        """Keep the messages of a study, and close those of the one before."""
        if self._messages is not None:
            self._messages.close()
        self._messages = messages
