"""A line of submissions that wait for something before they are posted, such as a copy from a device.

A rank's operations must be posted in the program's order. While an operation waits on the line, every later operation
of the process set therefore waits on the line, too. The program goes on meanwhile.

A thread that waits for the operation at the head of the line submits it itself if the copies end soon, and saves the
time in which one thread wakes the other.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

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


class Submission:
    """An operation that was put on a line. It looks like the submitted operation to the caller."""

    repeatable = None  # the operation cannot be repeated without the line

    def __init__(
        self,
        line: "SubmissionLine",
        number: int,
        steps: Callable[[], Any],
        events: Sequence[Awaited],
        prepare: Prepare | None,
    ) -> None:
        self.number = number
        self._line = line
        self._steps: Callable[[], Any] | None = steps
        self._events = events
        self._prepare = prepare
        self._preparing = threading.Lock()
        self._submitted: Future[Any] = Future()
        self._is_taken = threading.Lock()

    def prepare(self) -> None:
        """Start what the operation waits for, or wait until another thread has done so."""
        with self._preparing:
            prepare, self._prepare = self._prepare, None
            if prepare is not None:
                self._events = prepare()

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
        """Submit the operation, or wait until the other thread that does so has ended."""
        steps = self._steps
        if steps is None or not self._is_taken.acquire(blocking=False):
            self.await_submission()
            return
        self.prepare()
        events = self._events
        self._steps, self._events = None, ()  # they hold the operation's tensors
        found, failed = None, None
        self._line.begin_turn()
        try:
            for event in events:
                event.synchronize()
            found = steps()
        except BaseException as error:  # noqa: BLE001 -- `wait` raises it
            failed = error
        self._line.end_turn()
        if failed is None:
            self._submitted.set_result(found)
        else:
            self._submitted.set_exception(failed)

    @property
    def is_over(self) -> bool:
        """Whether the operation is submitted, or its submission has failed."""
        return self._submitted.done()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if not self._submitted.done():
            return False
        return self._submitted.exception() is not None or bool(self._submitted.result().done())

    def wait(self) -> Any:
        """Wait for the operation, and return its result."""
        if not self._submitted.done():
            self._line.help_with(self)
        return self._submitted.result().wait()

    def await_submission(self) -> None:
        """Wait until the operation is submitted, or its submission has failed."""
        self._submitted.exception()

    def forget(self) -> None:
        """Make the names of the operation usable again. The caller will not wait for the operation."""
        self._submitted.add_done_callback(_forget)


def _forget(submitted: "Future[Any]") -> None:
    forget = None if submitted.exception() is not None else getattr(submitted.result(), "forget", None)
    if forget is not None:
        forget()


class OwnSubmission:
    """An operation that the caller's thread submits when it waits for it, which it must do next."""

    def __init__(self, steps: Callable[[], Any], events: Sequence[Awaited]) -> None:
        self._steps = steps
        self._events = events

    def done(self) -> bool:
        """Return False: only `wait` submits the operation."""
        return False

    def wait(self) -> Any:
        """Submit the operation, wait for it, and return its result."""
        await_all(self._events)
        return self._steps().wait()

    def forget(self) -> None:
        """Do nothing: the operation was not submitted."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _Turn(threading.local):
    """Whether this thread is submitting the operation at the head of the line."""

    is_own = False


class SubmissionLine:
    """The line of one process set. Its own thread, or a thread that waits, submits the operations in order.

    Submitting must not wait for other ranks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._put = 0  # the number of submissions so far
        self._over = 0  # how many of them are posted
        self._turn = _Turn()
        self._thread: threading.Thread | None = None

    def is_ahead(self) -> bool:
        """Return whether operations wait on the line, so that an operation of this thread has to come after them."""
        return self._put > self._over and not self._turn.is_own

    def put(
        self, steps: Callable[[], Any], events: Sequence[Awaited] = (), prepare: Prepare | None = None
    ) -> Submission:
        """Put an operation at the end of the line.

        Args:
            steps: submits it, on any thread, and returns an object with `done` and `wait`.
            events: must have ended before.
            prepare: if given, is called once, on any thread; then its result must have ended, in place of `events`.
        """
        with self._lock:
            found = Submission(self, self._put, steps, events, prepare)
            self._put += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="multiring submissions", daemon=True)
                self._thread.start()
            self._jobs.put(found)
        return found

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

    def begin_turn(self) -> None:
        """Say that this thread submits the operation at the head of the line."""
        self._turn.is_own = True

    def end_turn(self) -> None:
        """Say that the operation is posted, or has failed."""
        self._turn.is_own = False
        self._over += 1  # by one thread at a time: the one whose turn it is

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
            del submission

    @staticmethod
    def _take(came: "deque[Submission | None]", submission: Submission | None) -> None:
        if submission is not None:
            submission.prepare()
        came.append(submission)
