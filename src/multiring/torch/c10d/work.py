"""torch's Work objects for operations in flight."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from multiring._runtime import Handle
from multiring._runtime.group.handles import OperationHandle
from multiring._runtime.group.posting import Calls
from multiring._runtime.group.receives import PostedReceive
from multiring.errors import MultiringError

_NO_TIMEOUT = timedelta(0)  # torch's value for "no timeout"


class Settable(Protocol):
    """A future, or what sets one."""

    def set_result(self, value: None) -> None:
        """Set the future, and run its callbacks."""


class FutureWork(Protocol):
    """The part of a Work that sets its future."""

    in_order: bool
    """Whether all ranks start this kind of operation in the same order, as collectives."""

    def wait(self) -> bool:
        """Wait for the result."""


class WorkOwner(Protocol):
    """The methods of a process group that its Work objects use."""

    @property
    def calls(self) -> Calls:
        """The common state of the group's operations."""

    def complete(self, work: "FutureWork", future: "Settable") -> None:
        """Make another thread set `future` to None once `work` has ended."""

    def settle_owed(self) -> None:
        """Copy the results of ended operations to their outputs if no caller has waited for these operations."""

    def failed(self, what: str, error: MultiringError) -> Exception:
        """Return torch's error of an operation that has failed with `error`."""


class SeveralHandles:
    """A handle of several operations. The handle has ended once all operations have ended."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.each = handles

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return all(each.done() for each in self.each)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all operations, and then raise the error of the first that failed; see Handle."""
        start = time.monotonic()
        failure: MultiringError | None = None
        for each in self.each:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - start))
            try:
                each.wait(left)
            except MultiringError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @property
    def open(self) -> Handle | None:
        """The first operation that has not ended, or None."""
        return next((each for each in self.each if not each.done()), None)


class OperationWork(dist.Work):
    """A started operation of a process group.

    `wait` returns once the result is in the output tensors, or raises torch's error. The operation ends by itself, even
    if no caller waits. If an output tensor is not contiguous, it receives the result only in a call of `wait` or
    `is_completed`, when the future is set, or when a caller waits for another operation of the group.

    `in_order`: all ranks start this kind of operation in the same order, as collectives.
    """

    in_order = True
    consequence = "the group cannot be used any more"

    def __init__(
        self,
        owner: WorkOwner,
        what: str,
        handle: Handle,
        result: tuple[Sequence[Tensor], Callable[[], None] | None],
        timeout_s: float,
    ) -> None:
        """Create the Work of a started operation.

        Args:
            owner: the process group.
            what: the name of the operation, for errors.
            handle: the handle of the operation.
            result: the output tensors, and a function that copies the result to them after the operation has ended.
            timeout_s: the operation fails if it has not ended after this many seconds from now on.
        """
        super().__init__()
        self._owner = owner
        self._what = what
        self._handle = handle
        self.outputs, self._settle = result
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._has_ended = False
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the result, and return True.

        Args:
            timeout: raise an error after this time, while the operation continues. By default, wait until the
                operation's own timeout.

        Raises:
            DistBackendError: the operation failed, or it is still in flight after `timeout`. After a failure, later
            calls raise the error again.
            RefusedError: this rank's arguments do not fit the data from the other ranks.
        """
        if not self._has_ended:
            self._await(timeout.total_seconds() if timeout else None)
            self._owner.settle_owed()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        if not self._has_ended and (self._handle.done() or time.monotonic() >= self._deadline):
            self._await(None)
        return self._has_ended

    def is_success(self) -> bool:
        """Return whether the operation has ended and succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error that `wait` raises, or None."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Return the output tensors.

        Raises:
            RuntimeError: the operation has not ended.
        """
        if not self.is_completed():
            raise RuntimeError(f"{self._what}: work needs to be completed before calling result(); call wait() first")
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """Return a future of the list of output tensors; it fails if `wait` raises an error."""
        with self._lock:
            if self._future is None:
                ended: Future[Any] = Future()
                # torch's C++ code sees only errors raised by a callback; an exception set from Python is a mere value.
                self._future = ended.then(self._outcome)
                if self._has_ended:
                    ended.set_result(None)
                else:
                    self._owner.complete(self, ended)
            return self._future

    def abort(self, rank: int) -> None:
        """Make the operation fail on all ranks, because of world rank `rank`."""
        if self._handle.done():
            return
        for handle in self._handle.each if isinstance(self._handle, SeveralHandles) else (self._handle,):
            self._native(handle).abort(rank)

    def _outcome(self, _ended: "Future[Any]") -> list[Tensor]:
        self.wait()
        return list(self.outputs)

    def _await(self, limit_s: float | None) -> None:
        left = self._deadline - time.monotonic()
        is_final = limit_s is None or left <= limit_s
        try:
            self._handle.wait(max(0.0, left if limit_s is None or is_final else limit_s))
        except MultiringError as error:
            self._end(self._owner.failed(self._what, error), error)
        except TimeoutError as error:
            if not is_final:
                raise dist.DistBackendError(
                    f"{self._what} is still in flight after {limit_s:g} s; it continues, and wait() may be called again"
                ) from error
            self._time_out(error)
        else:
            self._end(None, None)

    def _end(self, error: Exception | None, cause: Exception | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            if error is not None:
                # The frames of the traceback lead back to this object, and would keep the group until a collection.
                error.__cause__ = None if cause is None else cause.with_traceback(None)
                self._error = error
            elif self._settle is not None:
                self._settle()
            self._has_ended = True
            self._settle = None

    def _time_out(self, cause: TimeoutError) -> None:
        """Make the operation fail on all ranks after a timeout; the group cannot be used any more."""
        native = self._native(self._handle.open if isinstance(self._handle, SeveralHandles) else self._handle)
        ranks, _ = native.stalled_on()
        native.give_up(ranks[0] if ranks else self._owner.calls.services.world_rank)
        who = f"nothing has come from rank {', '.join(map(str, ranks))}" if ranks else "it has not ended"
        text = (
            f"{self._what}: timed out: {who} within {self._timeout_s:g} s, the timeout of the process group or of "
            f"this call; {self.consequence}. Look at what that rank does, or give a longer timeout"
        )
        self._end(dist.DistBackendError(text), cause)

    def _native(self, handle: Handle | None) -> OperationHandle | PostedReceive:
        """Return the part of `handle` that can be aborted; for an operation of several steps, the current step."""
        return handle if isinstance(handle, OperationHandle | PostedReceive) else self._owner.calls.latest


class Done(dist.Work):
    """The Work of an operation that has succeeded."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:  # noqa: ARG002 -- part of the interface
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Do nothing."""

    def get_future(self) -> "Future[Any]":
        """Return a future of the list of output tensors."""
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future
