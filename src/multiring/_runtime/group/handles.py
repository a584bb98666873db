"""Handles of operations in flight, and the errors of failed operations."""

import logging
import math
import os
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
from multiring._runtime.arrays import Buffer
from multiring._runtime.events import STEPS
from multiring._runtime.group.generation_end import GenerationEnd, forked
from multiring._runtime.named.signature_text import shown
from multiring.errors import MismatchError, MultiringError, PeerLostError, StallError, StateError

_log = logging.getLogger("multiring")
LINGER_S = 0.3
_NEVER_S = 1e9  # the settings' value for "never"
_END_S = 1.0  # within this time a waiting thread sees that its generation is over
_NEWS_S = 5.0  # within this time a rank hears why another has given an operation up


class Handle(Protocol):
    """An operation in flight.

    The caller must not use its arrays before `wait` has returned or raised.
    """

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended.

        Args:
            timeout: in seconds; None waits until the operation ends or fails, for example because of a stall.

        Raises:
            TimeoutError: the operation is still in flight after `timeout`. It continues; `wait` may be called again.
            MismatchError: the ranks called different operations; the inputs are intact.
            PeerLostError: a rank of the operation died or left; the contents of its arrays are undefined.
            StallError: a rank did not take part in time; the contents of the arrays are undefined.
        """


class AgreedHandle(Handle, Protocol):
    """The handle of an operation on which the ranks agree before it touches memory."""

    @property
    def titles(self) -> Mapping[int, str]:
        """Each rank's own title of the operation; available after a mismatch."""


class Executed(NamedTuple):
    """One entry of the executor's log: a move, or a lowering of the whole Schedule."""

    lowering: str | None
    segment: int
    move: int  # the move's index among this rank's moves of a segment
    size_bytes: int  # the bytes to or from all peers of a move, or the bytes of the extents of a lowering


# The identity of an operation, the same on all ranks: ("operation", the id of its group or of its sequence of messages,
# its number), or ("name", the id of its set of named operations, its name).
Key = tuple[str, int, int | str]


class Waiter:
    """The base of handles that wait for other ranks."""

    verdict = ""  # the reason of `give_up`, for the error's text

    @property
    def title(self) -> str:
        """A description of the operation for warnings and errors."""
        raise NotImplementedError

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the world ranks to wait for, and the seconds without progress."""
        raise NotImplementedError

    @property
    def key(self) -> Key | None:
        """The identity of the operation; None if it is not known yet."""
        return None

    @property
    def members(self) -> Sequence[int]:
        """The world ranks that take part in the collective; none for a message, or if they are not known."""
        return ()

    def give_up(self, silent: int) -> None:
        """Fail the operation on all ranks with a StallError about world rank `silent`."""
        raise NotImplementedError


class Patience(NamedTuple):
    """The times after which a waiting thread asks other ranks what they wait for.

    All times are in seconds.
    """

    look_s: float  # the time between two checks for progress
    ask_s: float  # the time before the first question
    sure_s: float  # the time before an answer is final

    @classmethod
    def of(cls, stall_warn_s: float) -> "Patience":
        """Return the times for a process that warns after `stall_warn_s` seconds.

        The times are 1, 3 and 10 s if `stall_warn_s` is 60 s or more, and proportionally less below 60 s. If stall
        warnings are switched off, the times are infinite: nothing is asked.
        """
        if stall_warn_s >= _NEVER_S:
            return cls(math.inf, math.inf, math.inf)
        share = min(1.0, stall_warn_s / 60.0)
        return cls(max(0.1, share), max(0.2, 3.0 * share), max(0.5, 10.0 * share))

    def after(self, quiet_s: float) -> float:
        """Return when to ask again after a question at `quiet_s`.

        Both times are in seconds without progress.
        """
        if quiet_s < self.sure_s:
            return self.sure_s
        return quiet_s + self.sure_s * (0.5 if quiet_s < 3.0 * self.sure_s else 1.5)


class StatusSource:
    """The interface to the status of other ranks.

    This class is the implementation for a job of one rank. rank_status.py has the implementation for several ranks.
    """

    patience = Patience(math.inf, math.inf, math.inf)

    def look(self, ranks: Sequence[int]) -> str:  # noqa: ARG002 -- subclasses use it
        """Return a text that says where these world ranks' programs are.

        The text has the form "; rank 1 is at ...; rank 2 does not answer", or is "".
        """
        return ""

    def know(self, group: Any) -> None:
        """Register a group of this process.

        Its `id` and the number of its `last` operation are read later.
        """

    def seek(self, waiter: Waiter) -> None:
        """Find out whether the ranks that `waiter` waits for also wait for this rank.

        See standoffs.py.
        """

    def has_started(self, key: Key) -> bool | None:  # noqa: ARG002 -- subclasses use it
        """Return whether this rank has started the operation; None if it does not take part in it."""
        return None

    def leave(self) -> Callable[[], bool]:
        """Stop asking, because this rank leaves.

        Returns:
            A function that returns whether another rank waits for an operation that this rank will never start.
        """
        return lambda: False

    def is_single(self) -> bool:
        """Return whether the program has a single thread, which waits for other ranks."""
        return True

    def let_end(self, rank: int) -> None:
        """Wait a moment for the lost world rank's process to end.

        Then the error of that process is shown first.
        """


NOBODY = StatusSource()


class Attention(NamedTuple):
    """What a thread needs to wait for an operation; the same for all operations of a group."""

    context: Context
    holdings: Holdings  # keep the memory of operations alive until these have ended
    rank_status: StatusSource
    look_s: float  # the time between two checks for progress
    warn_s: float  # the time before a warning about a silent rank
    generation: GenerationEnd

    @classmethod
    def of(
        cls,
        context: Context,
        holdings: Holdings,
        rank_status: StatusSource,
        stall_warn_s: float,
        generation: GenerationEnd,
    ) -> "Attention":
        """Return the Attention of a process that warns after `stall_warn_s` seconds."""
        look_s = min(stall_warn_s, rank_status.patience.look_s, _END_S if generation.may_end else math.inf)
        return cls(context, holdings, rank_status, look_s, stall_warn_s, generation)


@dataclass(frozen=True, slots=True)
class Posted:
    """A posted operation in the form that `Calls.post_again` needs."""

    spec: OperationSpec
    memory: tuple[Buffer | None, Buffer | None]
    title: str
    result: Any
    edition: int  # the version of the group's plans


class OperationHandle(Waiter):
    """The handle of one native operation."""

    def __init__(
        self,
        operation: Operation,
        title: str,
        ranks: Sequence[int],
        result: Any,
        attention: Attention,
        line: int,
    ) -> None:
        """Create the handle of `operation`.

        Args:
            operation: the native operation.
            title: the operation's title.
            ranks: the world ranks of its group.
            result: the value that `wait` returns.
            attention: how `wait` waits.
            line: the id of the sequence that numbers the operation: its group, or the messages from one rank to another
                under one tag.
        """
        self.operation = operation
        self._title = title
        self._ranks = ranks
        self._result = result
        self._attention = attention
        self._line = line
        self._warned = False
        self._ask_at_s = 0.0  # ask again after this many seconds without progress
        self._quiet_s = 0.0
        self.posted: Posted | None = None

    @property
    def title(self) -> str:
        """A description of the operation for warnings and errors."""
        number = self.operation.sequence // STEPS
        return f"{shown(self._title)} (operation {number} of the group of {len(self._ranks)})"

    @property
    def key(self) -> Key:
        """The identity of the operation, the same on all ranks."""
        return "operation", self._line, self.operation.sequence // STEPS

    @property
    def members(self) -> Sequence[int]:
        """The world ranks that take part in the collective."""
        return self._ranks

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the world ranks to wait for, and the seconds without progress."""
        return self._attention.context.stalled_on(self.operation)

    def give_up(self, silent: int) -> None:
        """Fail the operation on all ranks with a StallError about world rank `silent`."""
        self._attention.context.give_up(self.operation, silent)

    def abort(self, culprit: int) -> None:
        """Make the operation fail on all ranks, because rank `culprit` aborted the group."""
        self._attention.context.abort(self.operation, culprit)

    def refuse_fork(self) -> None:
        """Raise StateError in a process that was forked from the rank."""
        if self._attention.generation.is_inherited:
            raise self._attention.generation.error(self.title)

    def leave_warning(self) -> None:
        """Do not warn about a late rank: another operation does that waits for the same ranks."""
        self._warned = True

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._attention.context.has_ended(self.operation)

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`."""
        operation, attention = self.operation, self._attention
        start = time.monotonic()
        look_s = attention.look_s
        while True:
            left = look_s if timeout is None else timeout - (time.monotonic() - start)
            if attention.context.wait(operation, max(0.0, min(left, look_s))):
                break
            if attention.generation.is_over:
                attention.context.abort(operation, attention.generation.rank)
            self._mind_stall()
            if timeout is not None and time.monotonic() - start >= timeout:
                raise TimeoutError(f"{self.title} is still in flight after {timeout:g} s")
        attention.holdings.release(operation)
        if operation.fault is not FaultKind.NONE:
            if operation.fault is FaultKind.STATE and self._is_left_behind():
                raise attention.generation.error(self.title)
            if self.verdict:
                # The failure is still being reported to the other ranks. If this rank left at once, they might report
                # its departure as the cause.
                time.sleep(LINGER_S)
            raise failure_of(operation, self.title, self._ranks, attention.rank_status, self.verdict)
        return self._result

    @property
    def titles(self) -> dict[int, str]:
        """Each rank's own title of the operation; available after a mismatch."""
        return titles_of(self.operation, self._ranks)

    @property
    def log(self) -> list[Executed]:
        """The executor's steps in order; empty unless the setting `log_moves` is on."""
        return [
            Executed(lowering.name.lower() if lowering is not Lowering.NONE else None, segment, move, size)
            for lowering, segment, move, size in self.operation.log
        ]

    def _is_left_behind(self) -> bool:
        """Return whether a rank, this one or another, has given the operation up at the generation's end."""
        generation = self._attention.generation
        return generation.may_end and _ABORTED in self.operation.fault_text and generation.wait(_NEWS_S)

    def _mind_stall(self) -> None:
        ranks, quiet_s = self.stalled_on()
        rank_status = self._attention.rank_status
        if quiet_s <= self._quiet_s or not self._ask_at_s:  # the operation has made progress
            self._ask_at_s = rank_status.patience.ask_s
        self._quiet_s = quiet_s
        if quiet_s >= self._ask_at_s:
            self._ask_at_s = rank_status.patience.after(quiet_s)
            rank_status.seek(self)
        if quiet_s >= self._attention.warn_s and not self._warned:
            self._warned = True
            silent, where = ", ".join(map(str, ranks)), rank_status.look(ranks)
            _log.warning("%s: nothing has come from rank %s for %.0f s%s", self.title, silent, quiet_s, where)


def in_background(steps: Callable[[], Any], title: str) -> "ChainedHandle":
    """Run `steps` in a new thread, and return their handle.

    Each call has its own thread; in a shared thread, operations of different groups would wait for each other. The
    thread is a daemon, because the interpreter waits for other threads before it lets the rank leave the job.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(steps())
        except BaseException as error:  # noqa: BLE001 -- `wait` raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, name=f"multiring {title}", daemon=True)
    thread.start()
    return ChainedHandle(future, title, thread)


class SteppedHandle:
    """The handle of several steps. The steps run in the thread that calls `wait`."""

    def __init__(self, steps: Callable[[], Any]) -> None:
        self._steps = steps
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._outcome: Future[Any] = Future()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return os.getpid() != self._process or self._outcome.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Run the steps and return the operation's result; see `Handle`.

        The time-out does not interrupt a step.
        """
        _refuse_fork(self._process, "an operation of several steps")
        with self._lock:
            if not self._outcome.done():
                try:
                    self._outcome.set_result(self._run(timeout))
                except MultiringError as error:
                    self._outcome.set_exception(error)
        return self._outcome.result()

    def _run(self, timeout: float | None) -> Any:  # noqa: ARG002 -- subclasses use it
        return self._steps()

    def order(self, stream: int) -> Any:
        """Wait on the host, as the steps do not run on a device alone; then every stream finds the result."""
        del stream
        return self.wait()


class TimedSteps(SteppedHandle):
    """A SteppedHandle whose time-out covers all steps together.

    The steps accept a function that waits for a handle.
    """

    def __init__(self, steps: Callable[[Callable[[Handle], Any]], Any]) -> None:
        super().__init__(lambda: None)
        self._timed = steps

    def _run(self, timeout: float | None) -> Any:
        began_s = time.monotonic()

        def wait_for(step: Handle) -> Any:
            return step.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s)))

        return self._timed(wait_for)


class ChainedHandle(Waiter):
    """The handle of several steps. The steps run in another thread."""

    def __init__(self, future: "Future[Any]", title: str, thread: threading.Thread | None = None) -> None:
        self._future = future
        self._process = os.getpid()
        self._title = title
        self.thread = thread

    @property
    def title(self) -> str:
        """A description of the operation for warnings and errors."""
        return self._title

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return no ranks: the other thread's own handles report the stalled ranks."""
        return (), 0.0

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return os.getpid() != self._process or self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`."""
        _refuse_fork(self._process, self._title)
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:  # from Python 3.11 on, this is the builtin TimeoutError
            if self._future.done() and self._future.exception() is error:
                raise
            raise TimeoutError(f"{self._title} is still in flight after {timeout:g} s") from None

    def order(self, stream: int) -> Any:
        """Wait on the host, as the steps do not run on a device alone; then every stream finds the result."""
        del stream
        return self.wait()


def _refuse_fork(process: int, title: str) -> None:
    """Raise StateError in a fork of `process`: the thread that ends the operation, or has its lock, is not there."""
    if os.getpid() != process:
        raise forked(title)


_ABORTED = " aborted the group"  # in the native core's text
_LOST = re.compile(r"rank (\d+) ")  # the beginning of the native core's text about a lost rank


def failure_of(
    operation: Operation, title: str, ranks: Sequence[int], rank_status: StatusSource, verdict: str = ""
) -> MultiringError:
    """Return the error of a failed `operation`.

    `ranks` are the world ranks of its group. `verdict` is as for `Waiter.verdict`.
    """
    text = operation.fault_text
    if operation.fault is FaultKind.MISMATCH:
        text = f"{title}: the ranks do not agree: {told_apart(operation.descriptions)}; inputs are intact"
        return MismatchError(text, titles_of(operation, ranks))
    if operation.fault is FaultKind.PEER_LOST:
        lost = _LOST.match(text)
        if lost is not None:
            rank_status.let_end(int(lost[1]))
        return PeerLostError(f"{title}: {text}; the contents of its arrays are undefined")
    if operation.fault is FaultKind.STALL:
        where = verdict or (rank_status.look([operation.culprit]) if operation.culprit >= 0 else "")
        return StallError(f"{title}: {text}{where}; the contents of its arrays are undefined")
    return StateError(f"{title}: {text}")


def titles_of(operation: Operation, ranks: Sequence[int]) -> dict[int, str]:
    """Return each rank's own title of `operation`, after a mismatch."""
    return {ranks.index(rank): text for rank, text in sorted(operation.descriptions.items())}


def told_apart(descriptions: dict[int, str]) -> str:
    """Return "rank 1: X; ranks 0, 2: Y".

    The smallest set of ranks comes first, as the likeliest cause.
    """
    camps: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(descriptions.items()):
        camps[text].append(rank)
    ordered = sorted(camps.items(), key=lambda camp: (len(camp[1]), camp[1]))
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}" for text, ranks in ordered
    )
