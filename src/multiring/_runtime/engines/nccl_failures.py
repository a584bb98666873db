"""How an end of the nccl engine fails: what it notices, what it tells the other ranks, and what they tell it.

NCCL waits forever for a rank that has died or does not answer. So the ranks send each other control messages over the
host's network, and abort their communicators. Several ranks: verified without GPUs only
(docs/decisions/0115-nccl-engine.md).
"""

import json
import time
import weakref
from typing import TYPE_CHECKING

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime.engines.cuda_driver import CudaError
from multiring._runtime.engines.nccl_device import NcclDevice
from multiring._runtime.engines.nccl_library import NcclError
from multiring._runtime.engines.told import MOST_TEXT
from multiring.errors import CollectiveError, PeerLostError, StallError, StateError

if TYPE_CHECKING:
    from multiring._runtime.engines.nccl_communicator import NcclCommunicator
    from multiring._runtime.group.group import Group

_FAILURE, _QUESTION, _ANSWER = range(3)  # tags of control messages
_KINDS = {each.__name__: each for each in (PeerLostError, StallError, CollectiveError)}
_ANSWER_S = 1.0  # how long a rank that is asked may take to answer
_PAUSE_S = 0.001


class NcclFailures:
    """The part of NcclEngine that deals with failures."""

    def __init__(self, host: "Group", device: NcclDevice) -> None:
        self.group = 0  # the id of the group that the end serves
        self.failure: Exception | None = None
        self.patience_s = host.calls.services.stall_timeout_s
        self._host, self._device, self.driver = host, device, device.driver
        self._communicator: NcclCommunicator | None = None
        self._put = 0  # operations put on the device by this communicator
        self._is_refusing = False  # whether the ranks end operations on which they did not agree
        self._abandons: CollectiveError | None = None  # the error of these operations
        # The numbers of the last operation that has started before the agreement, and of the last with an agreement.
        self._last_ahead = self._last_confirmed = -1
        # NCCL's error, and the number of the operation whose confirmation shows that the ranks' calls are not its cause
        self._suspicion: tuple[Exception, int] | None = None
        self._reported: Exception | None = None  # a failure that another thread has heard of
        self._departure: tuple[Exception, float] | None = None  # the error from a time on
        self._asked_s: float | None = None
        self._answers: dict[int, int] = {}
        calls = host.calls
        self._numbers = calls.ranks
        self._id = calls.purpose_id("engine nccl")
        self._control = calls.services.control if host.size > 1 else None
        if self._control is not None:
            self._control.add(self._id, _Listener(self))
            weakref.finalize(self, self._control.remove, self._id)

    def _has_failed(self) -> bool:
        return self.failure is not None or self._reported is not None

    def _failure_soon(self) -> Exception:
        """Return the failure of any rank. Its message may still be on the way."""
        end_s = time.monotonic() + _ANSWER_S
        while not self._has_failed() and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        return self.failure or self._reported or CollectiveError("engine nccl: an operation has failed on another rank")

    def _check(self) -> None:
        """Raise the failure of this engine's group."""
        error = self.failure or self._reported
        if (error := error or self._abandons) is not None:
            raise error

    # ---- for the device's thread ----

    def look(self, oldest_s: float) -> None:
        """Detect a failure of an operation in flight."""
        if self.failure is not None or self._communicator is None:
            return
        suspicion = self._suspicion and self._suspicion[0]
        error = self._reported or suspicion or self._communicator.failure()
        if self._departure is not None and time.monotonic() > self._departure[1]:
            error = self._departure[0]
        if error is None and oldest_s > self._host.calls.services.stall_timeout_s:
            error = self._stall(oldest_s)
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Abort the communicator, fail all operations and tell the other ranks."""
        if self.failure is not None or error is self._abandons or self._is_undecided(error):
            return
        own = self._host.ranks[self._host.rank]
        if not isinstance(error, CollectiveError):
            ending = "; this process cannot use its devices any more and must end" if _stays(error) else ""
            error = CollectiveError(f"rank {own}: {error}{ending}")
        self.failure = error
        if error is not self._reported:
            self._tell_failure(error)
        if self._communicator is not None:
            self._communicator.abort()
        for operation in self._device.in_flight:
            if operation.owner is self:
                operation.end(error)

    def _is_undecided(self, error: Exception) -> bool:
        """Whether the cause of `error` may be that the ranks do not agree on an operation that has started already."""
        if not isinstance(error, NcclError):
            return False
        if self._suspicion is None:
            self._suspicion = error, self._last_ahead
        return self._is_refusing or self._last_confirmed < self._suspicion[1]

    def _stall(self, oldest_s: float) -> StallError | None:
        """Ask the other ranks what they have started. Return the error once they had the time to answer."""
        now_s = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
            self._tell_all(_QUESTION, b"")
        if now_s - self._asked_s < _ANSWER_S:
            return None
        ranks = self._host.ranks
        others = [index for index in range(self._host.size) if index != self._host.rank]
        silent = [index for index in others if index not in self._answers]
        behind = [index for index in others if index not in silent and self._answers[index] < self._put]
        what = "does not answer" if silent else "has not started the operation"
        who = silent or behind
        said = f"rank {', '.join(str(ranks[index]) for index in who)} {what}" if who else "all ranks have started it"
        return StallError(f"engine nccl: an operation has not ended for {oldest_s:.0f} s: {said}")

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Handle a message of another rank's end."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        if notice.tag == _QUESTION:
            self._tell(notice.rank, _ANSWER, str(self._put).encode())
        elif notice.tag == _ANSWER:
            self._answers[self._numbers.index(notice.rank)] = int(notice.payload)
        else:
            kind, text = json.loads(notice.payload)
            self.report(_KINDS.get(kind, CollectiveError)(text))

    def lose(self, number: int, *, died: bool, why: str) -> None:
        """Fail because a rank died or left."""
        if number in self._numbers:
            rank = self._host.ranks[self._numbers.index(number)]
            error = PeerLostError(f"engine nccl: rank {rank} {'died' if died else 'left'}: {why}")
            if died:
                self.report(error)
            else:
                self._depart(error)

    def _depart(self, error: Exception) -> None:
        """Fail if operations do not end soon: a rank has left, perhaps after its part of all of them."""
        if self._departure is None:
            self._departure = error, time.monotonic() + _ANSWER_S

    def report(self, error: Exception) -> None:
        """Fail soon, on the device's thread."""
        if self._reported is None:
            self._reported = error
            self._device.call(lambda: self.fail(error))

    def _tell_failure(self, error: Exception) -> None:
        """Make the other ranks' ends fail with `error`."""
        self._tell_all(_FAILURE, json.dumps([type(error).__name__, str(error)[:MOST_TEXT]]).encode())

    def _tell_all(self, tag: int, payload: bytes) -> None:
        for number in self._numbers:
            if number != self._numbers[self._host.rank]:
                self._tell(number, tag, payload)

    def _tell(self, number: int, tag: int, payload: bytes) -> None:
        if self._control is None:
            return
        try:
            self._control.send(number, self._id, tag, payload)
        except StateError:  # the rank takes no more messages; it is lost, or will be reported as silent
            return


class _Listener:
    """Passes control messages to an end of the engine, and does not keep it alive."""

    def __init__(self, engine: NcclFailures) -> None:
        self._engine = weakref.ref(engine)

    def hear(self, notice: ControlMessage) -> None:
        if (engine := self._engine()) is not None:
            engine.hear(notice)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        if (engine := self._engine()) is not None:
            engine.lose(rank, died=died, why=why)

    def end(self) -> None:
        if (engine := self._engine()) is not None:
            engine.report(StateError("engine nccl: this rank has left the job"))


def _stays(error: Exception) -> bool:
    return isinstance(error, CudaError) and error.stays
