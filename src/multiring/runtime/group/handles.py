"""Handles of operations in flight, and what a failed one means in words."""

import logging
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from multiring._native import Context, FaultKind, Holdings, Lowering, Operation, OperationSpec
from multiring.errors import MismatchError, MultiringError, PeerLostError, StallError, StateError
from multiring.runtime.arrays import Buffer
from multiring.runtime.events import STEPS
from multiring.runtime.named.signature_text import shown

_log = logging.getLogger("multiring")
LINGER_S = 0.3
_NEVER_S = 1e9  # seconds; what settings have for "never"


class Handle(Protocol):
    """An operation in flight. Its arrays belong to it until `wait` returned or raised."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended.

        Args:
            timeout: seconds; None waits until the operation ends or a stall is an error.

        Raises:
            TimeoutError: it is still in flight after `timeout`; it goes on, and may be waited for again.
            MismatchError: the ranks asked for different things; inputs are intact.
            PeerLostError: a rank it needs died or left; the contents are undefined.
            StallError: a rank did not take part in time; the contents are undefined.
        """


class AgreedHandle(Handle, Protocol):
    """The handle of an operation that the ranks agree on before it touches memory."""

    @property
    def titles(self) -> Mapping[int, str]:
        """What each rank of the group called the operation; known after a mismatch."""


class Executed(NamedTuple):
    """One entry of the executor's log: a move of the Schedule, or a lowering of all of it on one move's extents."""

    lowering: str | None
    segment: int
    move: int  # its place among the rank's moves of a segment
    size_bytes: int  # over all its peers; of a lowering: of the extents


class PostedOperation:
    """A native operation; the process holds the memory that ranks read and write until it has ended."""

    def __init__(self, context: Context, holdings: Holdings, operation: Operation) -> None:
        self.context = context
        self.operation = operation
        self._holdings = holdings

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self.context.has_ended(self.operation)

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the ranks of the world that are waited for, and for how many seconds nothing has moved."""
        return self.context.stalled_on(self.operation)

    def give_up(self, silent: int) -> None:
        """Fail on all ranks, as if rank `silent` of the world had been silent for too long."""
        self.context.give_up(self.operation, silent)

    def abort(self, culprit: int) -> None:
        """Fail on all ranks, as rank `culprit` of the world has aborted the group."""
        self.context.abort(self.operation, culprit)

    def release(self) -> None:
        """Let go of the memory; the operation has ended."""
        self._holdings.release(self.operation)

    @property
    def log(self) -> list[Executed]:
        """Return what the executor did, in its order; empty unless the setting `log_moves` is on."""
        return [
            Executed(lowering.name.lower() if lowering is not Lowering.NONE else None, segment, move, size)
            for lowering, segment, move, size in self.operation.log
        ]


# What is waited for, the same on all ranks: ("operation", the id of a group or of a line of messages, the number), or
# ("name", a set's id, the name).
Key = tuple[str, int, int | str]


class Waiter:
    """Whose `wait` a thread is in when it waits for other ranks."""

    verdict = ""  # why it was given up, for the error

    @property
    def title(self) -> str:
        """What is waited for, in words."""
        raise NotImplementedError

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the ranks of the world that are waited for, and for how many seconds nothing has moved."""
        raise NotImplementedError

    @property
    def key(self) -> Key | None:
        """What is waited for; None where that is not known yet."""
        return None

    def give_up(self, silent: int) -> None:
        """Fail on all ranks, as if rank `silent` of the world had been silent for too long."""
        raise NotImplementedError


class Patience(NamedTuple):
    """How long a thread waits for other ranks before it asks what they wait for themselves."""

    look_s: float  # between two looks at whether anything has moved
    ask_s: float  # before the first question
    sure_s: float  # before an answer is final

    @classmethod
    def of(cls, stall_warn_s: float) -> "Patience":
        """Return 1, 3 and 10 s where a silent rank is warned of after 60 s, less where that is sooner.

        Where it never is, because nobody wants to hear of stalls, nothing is asked.
        """
        if stall_warn_s >= _NEVER_S:
            return cls(math.inf, math.inf, math.inf)
        share = min(1.0, stall_warn_s / 60.0)
        return cls(max(0.1, share), max(0.2, 3.0 * share), max(0.5, 10.0 * share))

    def after(self, quiet_s: float) -> float:
        """Return when to ask again, who has asked at `quiet_s`."""
        if quiet_s < self.sure_s:
            return self.sure_s
        return quiet_s + self.sure_s * (0.5 if quiet_s < 3.0 * self.sure_s else 1.5)


class Lookout:
    """Sees nothing: there are no other ranks. See rank_status.py for the one that does."""

    patience = Patience(math.inf, math.inf, math.inf)

    def look(self, ranks: Sequence[int]) -> str:  # noqa: ARG002 -- for others
        """Return where these ranks of the world are: "; rank 1 is at ...; rank 2 does not answer", or ""."""
        return ""

    def know(self, group: Any) -> None:
        """Take note of a group of this process, its `id` and the number of its `last` operation."""

    def seek(self, waiter: Waiter) -> None:
        """Find out whether those that this thread waits for in `waiter` wait for this rank; see standoffs.py."""

    def leave(self) -> Callable[[], bool]:
        """Seek nothing any more. Return what tells whether another rank waits for what this one will not come to."""
        return lambda: False

    def is_single(self) -> bool:
        """Return whether this process's program has one thread, and it waits for other ranks."""
        return True

    def let_end(self, rank: int) -> None:
        """Wait a moment until this rank of the world, which was lost, has ended, where its error is to be shown."""


NOBODY = Lookout()


class Attention(NamedTuple):
    """How operations of a group are waited for; the same for all of them."""

    lookout: Lookout
    look_s: float  # between two looks at whether anything has moved
    warn_s: float  # before a silent rank is warned of

    @classmethod
    def of(cls, lookout: Lookout, stall_warn_s: float) -> "Attention":
        """Return that of a process that warns after so many seconds."""
        return cls(lookout, min(stall_warn_s, lookout.patience.look_s), stall_warn_s)


@dataclass(frozen=True, slots=True)
class Posted:
    """An operation that this thread waited for, as `Calls.post_again` needs it."""

    spec: OperationSpec
    memory: tuple[Buffer | None, Buffer | None]
    title: str
    result: Any
    edition: int  # of the group's plans


class OperationHandle(Waiter):
    """The handle of one native operation."""

    def __init__(
        self,
        posted_operation: PostedOperation,
        title: str,
        ranks: Sequence[int],
        result: Any,
        attention: Attention,
        line: int,
    ) -> None:
        """Handle `posted_operation`.

        Args:
            posted_operation: the operation in flight.
            title: of it.
            ranks: of its group, in the world.
            result: what `wait` returns.
            attention: how it is waited for.
            line: what numbers it: the group, or the messages from one rank to another under a tag; by its id.
        """
        self._posted_operation = posted_operation
        self._title = title
        self._ranks = ranks
        self._result = result
        self._attention = attention
        self._line = line
        self._warned = False
        self._ask_at_s = 0.0  # of quiet
        self._quiet_s = 0.0
        self.posted: Posted | None = None

    @property
    def title(self) -> str:
        """What is waited for, in words."""
        number = self._posted_operation.operation.sequence // STEPS
        return f"{shown(self._title)} (operation {number} of the group of {len(self._ranks)})"

    @property
    def key(self) -> Key:
        """What is waited for, the same on all ranks."""
        return "operation", self._line, self._posted_operation.operation.sequence // STEPS

    @property
    def operation(self) -> Operation:
        """The native operation."""
        return self._posted_operation.operation

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the ranks of the world that are waited for, and for how many seconds nothing has moved."""
        return self._posted_operation.stalled_on()

    def give_up(self, silent: int) -> None:
        """Fail on all ranks, as if rank `silent` of the world had been silent for too long."""
        self._posted_operation.give_up(silent)

    def abort(self, culprit: int) -> None:
        """Fail on all ranks, as rank `culprit` of the world has aborted the group."""
        self._posted_operation.abort(culprit)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._posted_operation.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`."""
        posted_operation = self._posted_operation
        start = time.monotonic()
        look_s = self._attention.look_s
        while True:
            left = look_s if timeout is None else timeout - (time.monotonic() - start)
            if posted_operation.context.wait(posted_operation.operation, max(0.0, min(left, look_s))):
                break
            self._mind_stall()
            if timeout is not None and time.monotonic() - start >= timeout:
                raise TimeoutError(f"{self.title} is still in flight after {timeout:g} s")
        posted_operation.release()
        if posted_operation.operation.fault is not FaultKind.NONE:
            if self.verdict:
                # The others are being told: were this rank to leave at once, they might take that for the cause.
                time.sleep(LINGER_S)
            raise failure_of(posted_operation.operation, self.title, self._ranks, self._attention.lookout, self.verdict)
        return self._result

    @property
    def titles(self) -> dict[int, str]:
        """What each rank of the group called the operation; known after a mismatch."""
        return titles_of(self._posted_operation.operation, self._ranks)

    def _mind_stall(self) -> None:
        ranks, quiet_s = self.stalled_on()
        lookout = self._attention.lookout
        if quiet_s <= self._quiet_s or not self._ask_at_s:  # it has moved
            self._ask_at_s = lookout.patience.ask_s
        self._quiet_s = quiet_s
        if quiet_s >= self._ask_at_s:
            self._ask_at_s = lookout.patience.after(quiet_s)
            lookout.seek(self)
        if quiet_s >= self._attention.warn_s and not self._warned:
            self._warned = True
            silent, where = ", ".join(map(str, ranks)), lookout.look(ranks)
            _log.warning("%s: nothing has come from rank %s for %.0f s%s", self.title, silent, quiet_s, where)


def in_background(steps: Callable[[], Any], title: str) -> "ChainedHandle":
    """Run `steps`, each of which may wait for other ranks, and return their handle.

    Each call has a thread of its own: were they to share one, operations of different groups would wait for each other.
    A daemon, because the interpreter waits for other threads before it lets a rank take its leave.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(steps())
        except BaseException as error:  # noqa: BLE001 -- whoever waits gets it
            future.set_exception(error)

    thread = threading.Thread(target=run, name=f"multiring {title}", daemon=True)
    thread.start()
    return ChainedHandle(future, title, thread)


class SteppedHandle:
    """The handle of an operation of several steps, which the thread that waits for it takes; it waits at once."""

    def __init__(self, steps: Callable[[], Any]) -> None:
        self._steps = steps
        self._lock = threading.Lock()
        self._outcome: Future[Any] = Future()

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._outcome.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`. No step is cut short by the time-out."""
        with self._lock:
            if not self._outcome.done():
                try:
                    self._outcome.set_result(self._run(timeout))
                except MultiringError as error:
                    self._outcome.set_exception(error)
        return self._outcome.result()

    def _run(self, timeout: float | None) -> Any:  # noqa: ARG002 -- for others
        return self._steps()


class TimedSteps(SteppedHandle):
    """The same, of steps that take what waits for a step's handle: then the time-out is that of all steps together."""

    def __init__(self, steps: Callable[[Callable[[Handle], Any]], Any]) -> None:
        super().__init__(lambda: None)
        self._timed = steps

    def _run(self, timeout: float | None) -> Any:
        began_s = time.monotonic()

        def wait_for(step: Handle) -> Any:
            return step.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s)))

        return self._timed(wait_for)


class ChainedHandle(Waiter):
    """The handle of an operation of several steps, which another thread takes one after the other."""

    def __init__(self, future: "Future[Any]", title: str, thread: threading.Thread | None = None) -> None:
        self._future = future
        self._title = title
        self.thread = thread

    @property
    def title(self) -> str:
        """What is waited for, in words."""
        return self._title

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return nothing: the other thread's waits know."""
        return (), 0.0

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`."""
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:  # the builtin one from Python 3.11 on
            if self._future.done() and self._future.exception() is error:
                raise
            raise TimeoutError(f"{self._title} is still in flight after {timeout:g} s") from None


_LOST = re.compile(r"rank (\d+) ")  # how the native core's words of a lost rank begin


def failure_of(
    operation: Operation, title: str, ranks: Sequence[int], lookout: Lookout, verdict: str = ""
) -> MultiringError:
    """Return the error that says why `operation`, of a group of these world ranks, failed; see `Waiter.verdict`."""
    text = operation.fault_text
    if operation.fault is FaultKind.MISMATCH:
        text = f"{title}: the ranks do not agree: {told_apart(operation.descriptions)}; inputs are intact"
        return MismatchError(text, titles_of(operation, ranks))
    if operation.fault is FaultKind.PEER_LOST:
        lost = _LOST.match(text)
        if lost is not None:
            lookout.let_end(int(lost[1]))
        return PeerLostError(f"{title}: {text}; the contents of its arrays are undefined")
    if operation.fault is FaultKind.STALL:
        where = verdict or (lookout.look([operation.culprit]) if operation.culprit >= 0 else "")
        return StallError(f"{title}: {text}{where}; the contents of its arrays are undefined")
    return StateError(f"{title}: {text}")


def titles_of(operation: Operation, ranks: Sequence[int]) -> dict[int, str]:
    """Return what each rank of the group called `operation`, after a mismatch."""
    return {ranks.index(rank): text for rank, text in sorted(operation.descriptions.items())}


def told_apart(descriptions: dict[int, str]) -> str:
    """Return "rank 1: X; ranks 0, 2: Y", the smallest camp first: it is the likelier culprit."""
    camps: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(descriptions.items()):
        camps[text].append(rank)
    ordered = sorted(camps.items(), key=lambda camp: (len(camp[1]), camp[1]))
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}" for text, ranks in ordered
    )
