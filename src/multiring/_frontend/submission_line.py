"""A line of submissions that wait for something before they are posted, such as a copy from a device.

A rank's operations must be posted in the program's order. While an operation waits on the line, every later operation
of the process set therefore waits on the line, too. The program goes on meanwhile.

A thread that waits for the operation at the head of the line submits it itself if the copies end soon, and saves the
time in which one thread wakes the other.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

from multiring.errors import StateError

_POLL_S = 200e-6  # a waiting thread polls for so long; a thread that sleeps sees the end later


class Awaited(Protocol):
    """Something that must end before an operation can be submitted, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether it has ended."""

    def synchronize(self) -> None:
        """Wait until it has ended."""


def await_all(events: Sequence[Awaited]) -> None:
    """Wait for all events: poll shortly, and then sleep."""
    until_s = time.monotonic() + _POLL_S
    for event in events:
        while not event.query() and time.monotonic() < until_s:
            time.sleep(0)  # other threads run
        event.synchronize()


Prepare = Callable[[], Sequence[Awaited]]
"""Starts what an operation waits for, such as a copy from a device, and returns it. It must neither wait nor raise."""
Decline = Callable[[Exception], None]
"""Takes part in an operation so that it fails on the other ranks, too, with this rank's error."""


class Submission:
    """An operation that was put on a line. It looks like the submitted operation to the caller.

    Ctrl-C may end a waiting thread at any point of its part in the submission. The line's thread comes to every
    operation, and completes what such a thread has left.
    """

    repeatable = None  # the operation cannot be repeated without the line

    def __init__(
        self,
        line: "SubmissionLine",
        number: int,
        steps: Callable[[], Any],
        events: Sequence[Awaited],
        prepare: Prepare | None,
        decline: Decline | None,
    ) -> None:
        self.number = number
        self._line = line
        self._steps: Callable[[], Any] | None = steps
        self._events = events
        self._prepare = prepare
        self._decline = decline
        self._preparing = threading.Lock()
        self._posting = threading.Lock()
        self._outcome: _Outcome | None = None
        # Free once the line's thread has come by. An Event has locks that Ctrl-C may leave taken for ever.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_forgotten = False

    def prepare(self) -> None:
        """Start what the operation waits for, or wait until another thread has done so."""
        with self._preparing:
            prepare, self._prepare = self._prepare, None
            if prepare is None:
                return
            self._events = (_Failed(_interrupted()),)  # if Ctrl-C ends the next lines, nobody knows what has started
            try:
                self._events = prepare()
            except Exception as error:  # noqa: BLE001 -- `submit` reports it
                self._events = (_Failed(error),)

    def is_ready(self) -> bool:
        """Return whether the operation could be submitted, or would fail, at once."""
        self.prepare()
        try:
            return all(event.query() for event in self._events)
        except Exception:  # noqa: BLE001 -- `submit` reports it
            return True

    def await_events(self) -> None:
        """Wait until the operation can be submitted, or would fail."""
        self.prepare()
        try:
            for event in self._events:
                event.synchronize()
        except Exception:  # noqa: BLE001 -- `submit` reports it
            return

    def submit(self) -> None:
        """Submit the operation, or wait until the other thread that does so has ended.

        Raises:
            KeyboardInterrupt: Ctrl-C has ended the wait for the events; the line's thread submits the operation.
        """
        with self._posting:
            if self._outcome is None:
                self.prepare()
                failed: Exception | None = None
                try:
                    for event in self._events:
                        event.synchronize()
                except Exception as error:  # noqa: BLE001 -- `wait` raises it
                    failed = error
                self._post(failed)
        # Ctrl-C may have ended this part of another thread, after the outcome was known.
        self._line.leave(self.number)
        self._forget_if_wanted()

    def open_gate(self) -> None:
        """Wake the threads that wait for the submission. The line's thread calls this method, after `submit`."""
        self._gate.release()

    def _post(self, failed: Exception | None) -> None:
        steps, self._steps, self._events = self._steps, None, ()  # they hold the operation's tensors
        decline, self._decline = self._decline, None
        try:
            with self._line.turn_of(self.number):
                if failed is None and steps is not None:
                    outcome = _Outcome(steps(), None)
                else:
                    outcome = _Outcome(None, failed or _interrupted())
                    if failed is not None and decline is not None:
                        decline(failed)
        except BaseException as error:  # noqa: BLE001 -- `wait` raises it
            outcome = _Outcome(None, error)
        self._line.leave(self.number)  # the program may go on as soon as it sees the outcome
        self._outcome = outcome

    @property
    def is_over(self) -> bool:
        """Whether the operation is submitted, or its submission has failed."""
        return self._outcome is not None

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        outcome = self._outcome
        return outcome is not None and (outcome.error is not None or bool(outcome.submitted.done()))

    def wait(self) -> Any:
        """Wait for the operation, and return its result.

        Raises:
            StateError: this process was forked after the operation was put on the line.
        """
        self._line.refuse_fork()
        if self._outcome is None:
            self._line.help_with(self)
        outcome = self.await_submission()
        if outcome.error is not None:
            raise outcome.error
        return outcome.submitted.wait()

    def await_submission(self) -> "_Outcome":
        """Wait until the operation is submitted, or its submission has failed."""
        self._line.refuse_fork()
        if self._outcome is None:
            with self._gate:
                pass
        assert self._outcome is not None  # noqa: S101
        return self._outcome

    def forget(self) -> None:
        """Make the names of the operation usable again. The caller will not wait for the operation."""
        self._is_forgotten = True
        self._forget_if_wanted()

    def _forget_if_wanted(self) -> None:
        with self._preparing:
            outcome = self._outcome
            if not self._is_forgotten or outcome is None:
                return
            self._is_forgotten = False
        forget = None if outcome.error is not None else getattr(outcome.submitted, "forget", None)
        if forget is not None:
            forget()


class _Outcome(NamedTuple):
    """The submitted operation, or the error of its submission."""

    submitted: Any
    error: BaseException | None


def _interrupted() -> StateError:
    return StateError(
        "a thread was interrupted while it submitted this operation, and the other ranks may wait for it; end the "
        "program, or leave the group and make it anew"
    )


class _Failed:
    """In place of the events of a preparation that did not end."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def query(self) -> bool:
        raise self._error

    def synchronize(self) -> None:
        raise self._error


class OwnSubmission:
    """An operation that the caller's thread submits when it waits for it, which it must do next."""

    def __init__(self, steps: Callable[[], Any], events: Sequence[Awaited], decline: Decline) -> None:
        self._steps = steps
        self._events = events
        self._decline = decline

    def done(self) -> bool:
        """Return False: only `wait` submits the operation."""
        return False

    def wait(self) -> Any:
        """Submit the operation, wait for it, and return its result."""
        try:
            await_all(self._events)
        except Exception as error:
            self._decline(error)
            raise
        return self._steps().wait()

    def forget(self) -> None:
        """Do nothing: the operation was not submitted."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _Turn(threading.local):
    """The number of the operation at the head of the line that this thread is submitting; -1: none."""

    number = -1


class SubmissionLine:
    """The line of one process set. Its own thread, or a thread that waits, submits the operations in order.

    Submitting must not wait for other ranks.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._put = 0  # the number of submissions so far
        self._over = 0  # how many of them are posted
        self._turn = _Turn()
        self._thread: threading.Thread | None = None

    def is_ahead(self) -> bool:
        """Return whether operations wait on the line, so that an operation of this thread has to come after them."""
        return self._put > self._over != self._turn.number

    def put(
        self,
        steps: Callable[[], Any],
        events: Sequence[Awaited] = (),
        prepare: Prepare | None = None,
        decline: Decline | None = None,
    ) -> Submission:
        """Put an operation at the end of the line.

        Args:
            steps: submits it, on any thread, and returns an object with `done` and `wait`.
            events: must have ended before.
            prepare: if given, is called once, on any thread; then its result must have ended, in place of `events`.
            decline: is called in place of `steps` with an error of `events`. Without it, other ranks may wait.

        Raises:
            StateError: this process is a fork of the line's.
        """
        self.refuse_fork()
        with self._lock:
            found = Submission(self, self._put, steps, events, prepare, decline)
            self._put += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="multiring submissions", daemon=True)
                self._thread.start()
            self._jobs.put(found)
        return found

    def refuse_fork(self) -> None:
        """Raise StateError in a fork: the line's thread is not there, and another thread may have had a lock."""
        if os.getpid() != self._process:
            raise StateError(
                "an operation on a process set's line: this process was forked from a rank; only the rank may "
                "communicate"
            )

    def is_next(self, submission: Submission) -> bool:
        """Return whether all earlier operations are posted."""
        return submission.number == self._over

    def help_with(self, submission: Submission) -> None:
        """Submit the operation on this thread if it comes to the head of the line, and its events end, soon."""
        until_s = time.monotonic() + _POLL_S
        while not submission.is_over and time.monotonic() < until_s:
            if self.is_next(submission) and submission.is_ready():
                submission.submit()
                return
            time.sleep(0)  # other threads run, such as the line's

    @contextmanager
    def turn_of(self, number: int) -> Iterator[None]:
        """Let this thread submit operation `number`, which is at the head of the line, in the block."""
        self._turn.number = number
        try:
            yield
        finally:
            self._turn.number = -1

    def leave(self, number: int) -> None:
        """Say that operation `number` is posted, or has failed. Only the first call for it counts."""
        with self._lock:
            self._over = max(self._over, number + 1)

    def drain(self) -> None:
        """Wait until all operations on the line have been submitted."""
        if self.is_ahead():
            self.put(_Done).await_submission()

    def close(self) -> None:
        """End the line's thread after the operations that are on the line."""
        with self._lock:
            if self._thread is not None:
                self._thread = None
                self._jobs.put(None)

    def _run(self) -> None:
        came: deque[Submission | None] = deque()
        while True:
            if not came:
                self._take(came, self._jobs.get())
            with suppress(queue.Empty):
                while True:  # copies of later operations start before this thread waits for an earlier one
                    self._take(came, self._jobs.get_nowait())
            submission = came.popleft()
            if submission is None:
                return
            submission.await_events()
            submission.submit()
            submission.open_gate()
            del submission

    @staticmethod
    def _take(came: "deque[Submission | None]", submission: Submission | None) -> None:
        if submission is not None:
            submission.prepare()
        came.append(submission)
