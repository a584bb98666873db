"""Copies of a study on other ranks, which can hold it if the rank that does is lost.

The rank that holds the study sends each change before anything that follows from it. Another rank keeps the copy as
bytes, and makes a study of it only if it has to.
"""

import copy
import logging
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from multiring.errors import StateError
from multiring.trials.messages import Message, StudyCopy, TrialAssignment, TrialTimes
from multiring.trials.plan import StudyArguments, StudyPlan, ranks_function
from multiring.trials.storage import later

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_log = logging.getLogger("multiring")
HOLDERS = 2  # the number of ranks with a copy: so many may be lost at once beside the one that holds the study
_MOST_BYTES = 1 << 16  # a sampler that takes more is not sent after each trial


def holding_order(hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks in the order in which they hold a study: each is lost before the next one takes it.

    The first rank of each host comes before the second ones, so that copies are on several hosts.

    Args:
        hosts: the ranks of each host.
    """
    most = max(map(len, hosts))
    return tuple(ranks[place] for place in range(most) for ranks in hosts if place < len(ranks))


class SendsMessages(Protocol):
    """What carries a study's messages to the ranks."""

    def send(self, to: int, message: Message) -> None:
        """Send a message to a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyBase:
    """What a copy needs beside the trials. What cannot be pickled is None; the copy's rank has arguments of its own."""

    name: str
    direction: Literal["minimize", "maximize"]
    space: Mapping[str, Any]  # Optuna's distributions
    trials: int
    ranks_per_trial: Any
    time_limit_s: float
    has_storage: bool
    storage: bytes | None
    pruner: bytes | None
    sampler: bytes | None
    attributes: Mapping[str, Any]  # of the study


class StudyCopies:
    """Keeps the copies up to date.

    Args:
        plan: the study's plan.
        messages: to the ranks with copies.
    """

    def __init__(self, plan: StudyPlan, messages: SendsMessages) -> None:
        self._plan, self._messages = plan, messages
        self._ranks: tuple[int, ...] = ()
        self._times: dict[int, TrialTimes] = {}
        self._assigned: list[TrialAssignment] = []
        self._attributes: Any = {}

    def keep_on(self, ranks: Iterable[int], times: Mapping[int, TrialTimes]) -> None:
        """Keep copies on these ranks from now on. Those that have none get all."""
        new = [rank for rank in ranks if rank not in self._ranks]
        self._ranks = tuple(ranks)
        if not new:
            return
        self._times.update(times)
        base = pickle.dumps(self._base())
        trials = [pickle.dumps(each) for each in self._plan.study.get_trials(deepcopy=False)]
        for rank in new:
            self._messages.send(rank, StudyCopy(base=base, sampler=self._sampler()))
            for number, trial in enumerate(trials):
                self._messages.send(rank, StudyCopy(number=number, trial=trial, times=self._times.get(number)))
            for assignment in self._assigned:
                self._messages.send(rank, StudyCopy(assignment=assignment))
            self._messages.send(rank, StudyCopy(is_whole=True))

    def note_asked(self, trial: "FrozenTrial") -> None:
        """Copy a trial that was asked for, and the sampler as it is now."""
        self._send(self._of(trial, sampler=self._sampler()))

    def note_trial(self, trial: "FrozenTrial", times: TrialTimes | None = None) -> None:
        """Copy a trial as it is now."""
        if times is not None:
            self._times[trial.number] = times
            self._assigned = [each for each in self._assigned if each.number != trial.number]
        self._send(self._of(trial, times=times))

    def note_report(self, number: int, step: int, value: float) -> None:
        """Copy a report."""
        self._send(StudyCopy(number=number, step=step, value=value))

    def note_assigned(self, assignment: TrialAssignment) -> None:
        """Copy which ranks get a trial."""
        self._assigned.append(assignment)
        self._send(StudyCopy(assignment=assignment))

    def _sampler(self) -> bytes | None:
        return pickled(self._plan.study.sampler, _MOST_BYTES)

    def _of(self, trial: "FrozenTrial", **more: Any) -> StudyCopy:
        study = self._plan.study
        attributes = study._storage.get_study_system_attrs(study._study_id)  # noqa: SLF001 -- Optuna's own, no public name
        changed = pickled(attributes, None) if attributes != self._attributes else None
        self._attributes = attributes
        return StudyCopy(number=trial.number, trial=pickle.dumps(trial), attributes=changed, **more)

    def _send(self, message: Message) -> None:
        for rank in self._ranks:
            self._messages.send(rank, message)

    def _base(self) -> StudyBase:
        plan, wanted = self._plan, self._plan.wanted
        return StudyBase(
            name=plan.study.study_name,
            direction="minimize" if plan.study.direction.name == "MINIMIZE" else "maximize",
            space=plan.space,
            trials=plan.trials,
            ranks_per_trial=None if callable(wanted.ranks_per_trial) else wanted.ranks_per_trial,
            time_limit_s=plan.time_limit_s,
            has_storage=wanted.storage is not None,
            storage=pickled(wanted.storage, None),
            pruner=pickled(plan.study.pruner, None),
            sampler=pickled(plan.study.sampler, None),
            attributes=plan.study.user_attrs,
        )


def pickled(value: Any, most_bytes: int | None) -> bytes | None:
    """Return a value as bytes; None if it cannot be pickled, or is larger than `most_bytes`."""
    try:
        found = pickle.dumps(value)
    except Exception:  # noqa: BLE001 -- any class may have errors of its own, and the caller does without the bytes
        return None
    return found if most_bytes is None or len(found) <= most_bytes else None


@dataclass(slots=True)
class CopiedStudy:
    """A study of a copy."""

    plan: StudyPlan
    times: Mapping[int, TrialTimes]
    assigned: Mapping[int, TrialAssignment]  # by serial


@dataclass(slots=True)
class StudyReplica:
    """The copy on a rank. The control thread writes it."""

    is_whole: bool = False
    _base: bytes | None = None
    _trials: dict[int, bytes] = field(default_factory=dict)
    _reports: dict[int, dict[int, float]] = field(default_factory=dict)
    _times: dict[int, TrialTimes] = field(default_factory=dict)
    _assigned: dict[int, TrialAssignment] = field(default_factory=dict)
    _attributes: bytes | None = None
    _sampler: bytes | None = None
    _is_sampler_late: bool = False  # whether the sampler was asked since `_sampler` was copied
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, message: StudyCopy) -> None:
        """Take a change."""
        with self._lock:
            self.is_whole = self.is_whole or message.is_whole
            self._base = self._base or message.base
            self._attributes = message.attributes or self._attributes
            if message.sampler is not None:
                self._sampler, self._is_sampler_late = message.sampler, False
            if message.trial is not None:
                is_new = message.number not in self._trials
                self._trials[message.number] = message.trial
                self._reports.pop(message.number, None)
                if is_new and self.is_whole and message.sampler is None:
                    self._is_sampler_late = True
            if message.assignment is not None:
                self._assigned[message.assignment.serial] = message.assignment
            if message.step >= 0:
                self._reports.setdefault(message.number, {})[message.step] = message.value
            if message.times is not None:
                self._times[message.number] = message.times
                self._assigned = {
                    serial: each for serial, each in self._assigned.items() if each.number != message.number
                }

    def study(self, own: StudyArguments, hosts: Sequence[Sequence[int]]) -> CopiedStudy:
        """Make a study of the copy.

        Args:
            own: this rank's arguments of `run`. They count where those of the lost rank could not be copied.
            hosts: the ranks of each host.

        Raises:
            StateError: the copy is not whole, or Optuna is missing here.
        """
        with self._lock:
            if not self.is_whole or self._base is None:
                raise StateError(
                    "the ranks that held the study and its copies are lost together; with a storage, the next job "
                    "goes on with the study"
                )
            try:
                return self._made(pickle.loads(self._base), own, hosts)  # noqa: S301 -- see messages.py
            except ImportError as error:
                raise StateError(
                    f"the study cannot move to this rank: {error}; install multiring[trials] on every host"
                ) from error

    def _made(self, base: StudyBase, own: StudyArguments, hosts: Sequence[Sequence[int]]) -> CopiedStudy:
        import optuna  # noqa: PLC0415 -- as in space.py

        sampler, is_exact = self._sampler_of(base, own)
        pruner = _restored(base.pruner, own.pruner)
        study = optuna.create_study(
            storage=optuna.storages.InMemoryStorage(),
            sampler=sampler,
            pruner=pruner if pruner is not None else optuna.pruners.NopPruner(),
            study_name=base.name,
            direction=base.direction,
        )
        for key, value in base.attributes.items():
            study.set_user_attr(key, value)
        inner, number = study._storage, study._study_id  # noqa: SLF001 -- a copy has Optuna's own attributes
        for key, value in _restored(self._attributes, {}).items():
            inner.set_study_system_attr(number, key, value)
        for at in range(max(self._trials, default=-1) + 1):
            inner.create_new_trial(number, template_trial=self._trial(at))
        if not is_exact:
            study.sampler.reseed_rng()  # with its seed alone, it would choose the first parameters again
        ranks_per_trial = own.ranks_per_trial if base.ranks_per_trial is None else base.ranks_per_trial
        ranks_of, constant = ranks_function(ranks_per_trial, set(base.space), sum(map(len, hosts)))
        writer = later(study, lambda: _restored(base.storage, own.storage)) if base.has_storage else None
        wanted = replace(own, ranks_per_trial=ranks_per_trial)
        plan = StudyPlan(
            wanted=wanted,
            study=study,
            writer=writer,
            space=dict(base.space),
            trials=base.trials,
            ranks_of=ranks_of,
            ranks_per_trial=constant,
            time_limit_s=base.time_limit_s,
            hosts=hosts,
        )
        if writer is not None:
            for at in range(len(self._trials)):
                writer.note(at)
        return CopiedStudy(plan, dict(self._times), dict(self._assigned))

    def _sampler_of(self, base: StudyBase, own: StudyArguments) -> tuple[Any, bool]:
        """Return the sampler, and whether it is as the lost rank's was after its last trial."""
        if self._sampler is not None:
            return pickle.loads(self._sampler), not self._is_sampler_late  # noqa: S301 -- see messages.py
        if base.sampler is None and own.sampler is None:
            _log.warning(
                "trials: the sampler cannot be pickled, and this rank has no sampler; the study goes on with Optuna's "
                "default. Pass the sampler to `run` on every rank"
            )
        return _restored(base.sampler, own.sampler), False

    def _trial(self, number: int) -> "FrozenTrial":
        trial: FrozenTrial = copy.copy(pickle.loads(self._trials[number]))  # noqa: S301 -- see messages.py
        reports = {**self._reports.get(number, {})}
        trial.intermediate_values = {**trial.intermediate_values, **reports}
        return trial


def _restored(data: bytes | None, other: Any) -> Any:
    return other if data is None else pickle.loads(data)  # noqa: S301 -- see messages.py
