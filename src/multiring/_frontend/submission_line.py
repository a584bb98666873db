"""A line of submissions that wait for something before they are posted, such as a copy from a device.

A rank's operations must be posted in the program's order. While an operation waits on the line, every later operation
of the process set therefore waits on the line, too. The program goes on meanwhile.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Submission:
    """An operation that was put on a line. It looks like the submitted operation to the caller."""

    repeatable = None  # the operation cannot be repeated without the line

    def __init__(self) -> None:
        self._submitted: Future[Any] = Future()

    def run(self, steps: Callable[[], Any]) -> None:
        """Submit the operation by `steps`, which return an object with `done` and `wait`."""
        try:
            self._submitted.set_result(steps())
        except BaseException as error:  # noqa: BLE001 -- `wait` raises it
            self._submitted.set_exception(error)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if not self._submitted.done():
            return False
        return self._submitted.exception() is not None or bool(self._submitted.result().done())

    def wait(self) -> Any:
        """Wait for the operation, and return its result."""
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


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SubmissionLine:
    """The line of one process set. A thread of its own submits the operations in order.

    Submitting must not wait for other ranks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Submission, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._waiting = 0  # the submissions that are not posted yet
        self._thread: threading.Thread | None = None

    def is_ahead(self) -> bool:
        """Return whether operations wait on the line, so that an operation of this thread has to come after them."""
        return self._waiting > 0 and threading.current_thread() is not self._thread

    def put(self, steps: Callable[[], Any]) -> Submission:
        """Put an operation at the end of the line: `steps` will submit it, on the line's thread."""
        found = Submission()
        with self._lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="multiring submissions", daemon=True)
                self._thread.start()
            self._jobs.put((found, steps))
        return found

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
        while (job := self._jobs.get()) is not None:
            submission, steps = job
            submission.run(steps)
            with self._lock:
                self._waiting -= 1
            del job, submission, steps  # they hold the operation's tensors
