"""The messages between the rank that holds a study and the ranks that run its trials.

They are control messages, which the core carries beside all operations: nobody polls, a rank that trains for hours is
not silent, and the news of a lost rank comes after its last message.
"""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime import Group
from multiring._runtime.named.channel import ControlChannel, MessageKind
from multiring.errors import StallError, StateError

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
class RankLoss:
    """From this process's control thread: a rank died or left."""

    rank: int
    why: str


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
            self._channel = ControlChannel(self._control, self._id, self._ranks, self._own)
            peers = self._ranks[1:] if self._own == 0 else self._ranks[:1]
            group.calls.services.context.link_with(list(peers))
            self._control.add(self._id, self)

    def send(self, to: int, message: Message) -> None:
        """Send a message to a rank; one to a lost rank is dropped.

        Raises:
            StallError: the rank has taken no message for a minute.
            StateError: this rank has left the job.
        """
        if to == self._own or self._channel is None:
            self._receive(self._own, message)
            return
        payload, until_s = pickle.dumps(message), time.monotonic() + _MOST_S
        with self._lock:
            while True:
                try:
                    self._channel.send(to, 0, MessageKind.PICKLE, payload)
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
            self._receive(number, RankLoss(rank=number, why=f"it {'died' if died else 'left'}, {why}"))

    def end(self) -> None:
        """Hand on that this rank leaves the job."""
        self._receive(self._own, StudyEnd("multiring was shut down"))
