"""`run`: the loop of every rank of a study."""

import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from multiring._frontend.lifecycle import init
from multiring._frontend.process_sets import in_part
from multiring._runtime import Group
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.job.job import current
from multiring._runtime.job.membership import Membership
from multiring._runtime.job.world import World
from multiring.errors import ArgumentError, MultiringError, PeerLostError, StateError
from multiring.trials.desk import TrialDesk
from multiring.trials.holder import StudyHolder
from multiring.trials.messages import Message, ObjectiveOutcome, TrialAssignment, TrialMessages
from multiring.trials.plan import RanksPerTrial, StudyArguments, StudyPlan, plan_of
from multiring.trials.results import StudyResult
from multiring.trials.trial import Trial, outcome_of_error, outcome_of_value

_log = logging.getLogger("multiring")


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
            parameter, that gives each trial's number of ranks.
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
        ArgumentError: on every rank: an argument is wrong, the storage cannot be opened, or it has a study of this name
            with another space or direction.
        ImportError: on every rank: Optuna is not installed on rank 0's host.
        PeerLostError: a rank died or left. The trials in flight have no result; with a storage, the next job tries them
            again.
        StateError: the sampler or the pruner raised an error, or the call is inside a trial.
    """
    init()
    world = current()
    if world.whole is not None:
        raise StateError("trials.run: this is a trial of another study; want the call outside the objective")
    if not callable(objective):
        raise ArgumentError(f"objective={objective!r}: want a function of a trial")
    group = world.group.twin()
    plan, refusal = None, None
    if group.rank == 0:
        try:
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
            plan = plan_of(wanted, world.membership.topology.hosts)
        except Exception as error:  # noqa: BLE001 -- it is raised on every rank
            refusal = error
    _raise_everywhere(group, refusal)
    return _Run(objective, world, group, plan).result()


def _raise_everywhere(group: Group, error: Exception | None) -> None:
    """Raise rank 0's error on every rank, if it has one."""
    told = _told(group, None if error is None else (isinstance(error, ImportError), str(error)))
    if error is not None and isinstance(error, MultiringError | ImportError):
        raise error
    if told is not None:
        is_import, text = told
        raise (ImportError(text) if is_import else ArgumentError(text)) from error


def _told(group: Group, value: Any) -> Any:
    """Return rank 0's value on every rank."""
    data = np.frombuffer(pickle.dumps(value), np.uint8).copy()
    size = np.array([len(data)])
    group.broadcast(size, label="trials")
    if group.rank != 0:
        data = np.empty(int(size[0]), np.uint8)
    group.broadcast(data, label="trials")
    return pickle.loads(data.tobytes())  # noqa: S301 -- from rank 0, which has proved to know the job's secret


class _Run:
    """One call of `run` on this rank."""

    def __init__(self, objective: Callable[[Trial], Any], world: World, group: Group, plan: StudyPlan | None) -> None:
        self._objective, self._world, self._group = objective, world, group
        self._desk = TrialDesk()
        self._ends: dict[int, GenerationEnd] = {}  # of trials that may still run on other ranks, by assignment
        self._holder: StudyHolder | None = None
        self._messages = TrialMessages(group, self._receive)
        self._desk.messages = self._messages
        if plan is not None:
            self._holder = StudyHolder(plan, self._messages)

    def _receive(self, sender: int, message: Message) -> None:
        # What ranks tell the study, and what the study tells this rank, differ by their classes.
        self._desk.receive(sender, message)
        if self._holder is not None:
            self._holder.receive(sender, message)

    def result(self) -> StudyResult:
        """Run the trials that this rank gets; return the study's result once it is over."""
        found, is_interrupted = None, True
        try:
            self._group.barrier(label="trials")  # from here on, every rank receives messages
            if self._holder is not None:
                self._holder.start()
            while isinstance(told := self._desk.next(), TrialAssignment):
                self._run(told)
            if told.error:
                raise StateError(f"trials.run: the study cannot go on: {told.error}")
            is_interrupted = False
        finally:
            if self._holder is not None:
                found = self._holder.close(is_interrupted=is_interrupted)
            self._messages.close()
        result: StudyResult = _told(self._group, found)
        for end in self._ends.values():  # the holder has heard the end of every trial from all its ranks
            end.recycle(self._world.context)
        return result

    def _run(self, told: TrialAssignment) -> None:
        """Run the objective of a trial as a part of the job, and tell the study how it ended."""
        world = self._world
        for serial in told.over:
            self._ends.pop(serial).recycle(world.context)
        end = self._ends[told.serial] = GenerationEnd(world.services.world_rank, may_end=True, recycles=True)
        membership = Membership(
            job=f"{world.membership.key}|trials {self._group.calls.id}.{told.serial}",
            number=0,
            rank=told.ranks.index(world.membership.rank),
            endpoints=tuple(world.membership.endpoints[rank] for rank in told.ranks),
            topology=world.membership.topology.restricted(told.ranks),
        )
        with in_part(membership, end) as group:
            trial = Trial(self._desk, told.serial, told.number, dict(told.params), told.ranks, group)
            outcome = self._outcome(trial, told.serial, end)
        self._desk.tell(outcome)

    def _outcome(self, trial: Trial, serial: int, end: GenerationEnd) -> ObjectiveOutcome:
        self._desk.begin(serial, end)
        try:
            try:
                outcome = outcome_of_value(serial, self._objective(trial))
            finally:
                self._desk.leave()
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 -- told to the study, or raised
            outcome = self._outcome_of(error, trial, serial)
        if self._desk.why_stopped(serial) is not None and outcome.state == "failed":
            return ObjectiveOutcome(serial=serial, state="stopped", reason=self._desk.why_stopped(serial) or "")
        return outcome

    def _outcome_of(self, error: BaseException, trial: Trial, serial: int) -> ObjectiveOutcome:
        """Return the outcome of an objective that raised an error; raise it if it ends the study on this rank."""
        if isinstance(error, PeerLostError):  # perhaps because a rank is lost, which ends the study
            self._desk.require_ranks()
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
