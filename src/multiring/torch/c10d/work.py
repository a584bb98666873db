"""Work: an operation in flight, as torch waits for it."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from multiring.errors import MultiringError
from multiring.runtime import Handle
from multiring.runtime.group.handles import OperationHandle, PostedOperation
from multiring.runtime.group.posting import Calls
from multiring.runtime.group.receives import PostedReceive
from multiring.torch.c10d.errors import torch_error

_NO_TIMEOUT = timedelta(0)  # torch's own word for it


class Owner(Protocol):
    """The process group, as its operations see it."""

    @property
    def calls(self) -> Calls:
        """What the group's operations have in common."""

    def complete(self, work: "OperationWork", future: "Future[Any]") -> None:
        """Set `future`, to None, once `work` has ended; by another thread."""

    def settle_owed(self) -> None:
        """Put what has ended, and nobody has waited for, where it belongs."""


class SeveralHandles:
    """The handle of several operations, that have ended once all have."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.each = handles

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(each.done() for each in self.each)

    def wait(self, timeout: float | None = None) -> None:
        """As of a Handle: all are waited for, and then what the first that failed raised is raised."""
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
        """The first that has not ended."""
        return next((each for each in self.each if not each.done()), None)


class OperationWork(dist.Work):
    """An operation of a process group, from its start on.

    `wait` returns once the result is in the tensors, or raises torch's error. It ends by itself, whether or not
    anybody waits; but where tensors are not in one piece, their contents come with `wait`, with `is_completed`, with
    the future, or when another of the group's operations is waited for.

    `in_order`: all ranks start it in the same order among the group's operations, as collectives are.
    """

    in_order = True
    consequence = "the group cannot be used any more"

    def __init__(
        self,
        owner: Owner,
        what: str,
        handle: Handle,
        result: tuple[Sequence[Tensor], Callable[[], None] | None],
        timeout_s: float,
    ) -> None:
        """Be the work of `handle`.

        Args:
            owner: the process group.
            what: for errors.
            handle: of the operation.
            result: the tensors it is in, and what puts it there once the operation has ended.
            timeout_s: after so long, from now on, the operation fails.
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
        """Return True once the result is there.

        Args:
            timeout: after that an error is raised, and the operation goes on; without it, it is the operation's own.

        Raises:
            DistBackendError: the operation failed, which is final; or is in flight still after `timeout`.
            RefusedError: this rank's arguments do not fit what the others sent.
        """
        if not self._has_ended:
            self._await(timeout.total_seconds() if timeout else None)
            self._owner.settle_owed()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended, in whatever way."""
        if not self._has_ended and (self._handle.done() or time.monotonic() >= self._deadline):
            self._await(None)
        return self._has_ended

    def is_success(self) -> bool:
        """Return whether the result is there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return what `wait` raises."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Return the tensors that the result is in.

        Raises:
            RuntimeError: it is not there yet.
        """
        if not self.is_completed():
            raise RuntimeError(
                f"{self._what}: work needs to be completed before calling result(); want wait() before it"
            )
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """Return a future of the list of tensors that the result is in; it fails where `wait` raises."""
        with self._lock:
            if self._future is None:
                ended: Future[Any] = Future()
                # Only what a callback raises is an error to torch's C++, too; an exception set from Python is a value.
                self._future = ended.then(self._outcome)
                if self._has_ended:
                    ended.set_result(None)
                else:
                    self._owner.complete(self, ended)
            return self._future

    def abort(self, rank: int) -> None:
        """Let the operation fail on all ranks, on account of `rank` of the world."""
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
            self._end(torch_error(self._what, error), error)
        except TimeoutError as error:
            if not is_final:
                raise dist.DistBackendError(
                    f"{self._what} is still in flight after {limit_s:g} s; it goes on, and may be waited for again"
                ) from error
            self._time_out(error)
        else:
            self._end(None, None)

    def _end(self, error: Exception | None, cause: Exception | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            if error is not None:
                error.__cause__ = cause
                self._error = error
            elif self._settle is not None:
                self._settle()
            self._has_ended = True
            self._settle = None

    def _time_out(self, cause: TimeoutError) -> None:
        """Let the operation fail on all ranks: none can take part in the group any more."""
        native = self._native(self._handle.open if isinstance(self._handle, SeveralHandles) else self._handle)
        ranks, _ = native.stalled_on()
        native.give_up(ranks[0] if ranks else self._owner.calls.services.world_rank)
        who = f"nothing has come from rank {', '.join(map(str, ranks))}" if ranks else "it has not ended"
        text = (
            f"{self._what}: timed out: {who} within {self._timeout_s:g} s, the timeout of the process group or of "
            f"this call; {self.consequence}. Look at what that rank does, or give a longer timeout"
        )
        self._end(dist.DistBackendError(text), cause)

    def _native(self, handle: Handle | None) -> OperationHandle | PostedReceive | PostedOperation:
        """Return what of `handle` can be given up; of an operation of several steps, the one it is at."""
        return handle if isinstance(handle, OperationHandle | PostedReceive) else self._owner.calls.latest


class Done(dist.Work):
    """An operation that has ended well."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:  # noqa: ARG002 -- of the contract
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
        """Return the tensors that the result is in."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Do nothing."""

    def get_future(self) -> "Future[Any]":
        """Return a future of the list of tensors that the result is in."""
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future
