"""The messages between the rank that holds a study and the ranks that run its trials.

They are control messages, which the core carries beside all operations: nobody polls, a rank that trains for hours is
not silent, and the news of a lost rank comes after its last message.
"""

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime import Group
from multiring._runtime.named.channel import ControlChannel, MessageKind
from multiring.errors import StallError, StateError
from multiring.trials.results import PopulationResult, StudyResult

_AGAIN_S, _MOST_S = 0.01, 60.0  # how often, and how long, a message is offered to a rank that takes none at the moment


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialAssignment:
    """To the ranks of a trial: run it."""

    serial: int  # of this assignment in this call of `run`
    number: int
    params: dict[str, Any]
    ranks: tuple[int, ...]
    over: tuple[int, ...] = ()  # assignments of the receiver that have ended on all their ranks since the last one


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialStop:
    """To the ranks of a trial: end it."""

    serial: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneAnswer:
    """To the ranks of a trial: the answer to a question of its first rank."""

    serial: int
    question: int
    step: int | None  # the last that the first rank had reported
    prunes: bool


@dataclass(frozen=True, slots=True)
class StudyEnd:
    """To all ranks: the study is over."""

    error: str = ""  # why it could not go on
    result: StudyResult | PopulationResult | None = None  # what it has found; None if it was interrupted
    lost: tuple[int, ...] = ()  # the ranks that were lost meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport:
    """From a trial's first rank: a value."""

    serial: int
    step: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneQuestion:
    """From a trial's first rank: shall the trial be pruned?"""

    serial: int
    question: int
    step: int | None
    ends: bool = False  # whether a yes ends the trial, so that what it reports until then does not count


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveOutcome:
    """From each rank of a trial: how its objective ended."""

    serial: int
    state: str  # "complete", "pruned", "failed", or "stopped" if it was told to end
    value: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundValue:
    """From each rank of a member of a population: it has ended a round, and waits. The first rank's value counts."""

    serial: int
    round: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundDecision:
    """To each rank of a member of a population: how it goes on after a round."""

    serial: int
    round: int
    sends_to: tuple[tuple[int, ...], ...]  # the ranks of the members that copy this one
    receives_from: tuple[int, ...] | None  # the ranks of the member that this one copies
    source: int | None  # the number of that member
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoss:
    """From this process's control thread: a rank died or left."""

    rank: int
    why: str
    died: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LostRanks:
    """From this process's thread that follows the votes: the ranks that the others go on without."""

    ranks: Mapping[int, str]  # why each was lost


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCopy:
    """To a rank that keeps a copy of the study: what has changed.

    The parts are pickled by the sender, so that the receiver needs Optuna only if it has to hold the study.
    """

    base: bytes | None = None  # a StudyBase, with the first copy
    number: int = -1  # of the trial
    trial: bytes | None = None  # Optuna's FrozenTrial as it is now
    step: int = -1  # of a report
    value: float = 0.0
    times: "TrialTimes | None" = None  # of a trial that is over
    assignment: TrialAssignment | None = None  # of this trial
    attributes: bytes | None = None  # Optuna's own attributes of the study, if they have changed
    sampler: bytes | None = None  # as it is now; None if it was not asked, cannot be pickled, or is large
    is_whole: bool = False  # whether all that came before this message has been copied


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """When a trial ran, and where."""

    began_s: float  # since the study began
    ended_s: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentRecord:
    """What a rank knows of a trial that it has got."""

    assignment: TrialAssignment
    age_s: float  # the seconds since it got it
    reports: tuple[TrialReport, ...]  # if it is the trial's first rank
    questions: tuple[PruneQuestion, ...]  # of the first rank
    answers: tuple[PruneAnswer, ...]
    outcome: ObjectiveOutcome | None  # None while it runs


@dataclass(frozen=True, slots=True)
class RankStanding:
    """To the rank that holds the study from now on: this rank's last trials."""

    records: tuple[AssignmentRecord, ...]


Message = Any  # one of the classes above


class TrialMessages:
    """Sends and receives the messages of one study on this rank.

    Args:
        group: the group of all ranks, which nothing else uses.
        receive: is called with (sender, message), on a thread that must not block.
    """

    def __init__(self, group: Group, receive: Callable[[int, Message], None]) -> None:
        self._receive = receive
        self._ranks, self._own = group.calls.ranks, group.rank
        self._control = group.calls.services.control if group.size > 1 else None
        self._id = group.calls.purpose_id("trials")
        self._lock = threading.Lock()
        self._channel: ControlChannel | None = None
        if self._control is not None:
            self._context = group.calls.services.context
            self._channel = ControlChannel(self._control, self._id, self._ranks, self._own)
            self.link([rank for rank in range(len(self._ranks)) if 0 in (rank, self._own)])
            self._control.add(self._id, self)

    def link(self, ranks: Iterable[int]) -> None:
        """Make the connections to these ranks that are missing. They make the same call."""
        if self._control is not None:
            self._context.link_with([self._ranks[rank] for rank in ranks if rank != self._own])

    def send(self, to: int, message: Message) -> None:
        """Send a message to a rank; one to a lost rank is dropped.

        Raises:
            StallError: the rank has taken no message for a minute.
            StateError: this rank has left the job.
        """
        if to == self._own or self._channel is None:
            self._receive(self._own, message)
            return
        payload = pickle.dumps(message)
        with self._lock:
            for send_part in self._channel.parts(to, 0, MessageKind.PICKLE, payload):
                self._offer(to, send_part)

    def _offer(self, to: int, send_part: Callable[[], bool]) -> None:
        """Send a part of a message. Parts that the rank has taken are not sent again, as it would see them twice."""
        until_s = time.monotonic() + _MOST_S
        while True:
            try:
                send_part()
            except StateError as error:
                if time.monotonic() > until_s:
                    raise StallError(f"trials: rank {to} has taken no message for {_MOST_S:g} s") from error
                time.sleep(_AGAIN_S)
            else:
                return

    def wait_until_handled(self, seconds: float) -> None:
        """Wait until the messages and losses that have come so far are received, but at most `seconds`."""
        if self._control is not None:
            self._control.wait_until_handled(seconds)

    def close(self) -> None:
        """Receive nothing more."""
        if self._control is not None:
            self._control.remove(self._id)

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Hand a message on once its last part has come."""
        if notice.kind is ControlMessageKind.MESSAGE and self._channel is not None:
            message = self._channel.receive(notice)
            if message is not None:
                # The bytes come over the job's own connections, from a process that has proved to know its secret.
                self._receive(message.sender, pickle.loads(message.payload))  # noqa: S301

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: messages have no names."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Hand on that a rank is lost."""
        if rank in self._ranks:
            number = self._ranks.index(rank)
            self._receive(number, RankLoss(rank=number, why=f"it {'died' if died else 'left'}, {why}", died=died))

    def end(self) -> None:
        """Hand on that this rank leaves the job."""
        self._receive(self._own, StudyEnd("multiring was shut down"))
