"""The handle of a named operation, which may be posted twice.

The operation is posted in this rank's order, and then possibly again in the negotiated order.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.group.group import Group
from multiring._runtime.group.handles import LINGER_S, Handle, Key, OperationHandle, Posted, Waiter
from multiring.errors import MismatchError, MultiringError, Signature, StallError

_FEW = 64  # up to this number of names, ended operations are not searched for and removed

Start = Callable[[Group, str], Handle]  # posts a collective on the given group, with the given label


class Keeper(Protocol):
    """The set of named operations to which a handle belongs."""

    id: int  # the set's id, the same on all ranks
    ranks: tuple[int, ...]  # the world ranks of the set
    generation: GenerationEnd  # of the set's operations

    def settle(self, handle: "NamedHandle", posted: Handle, error: MismatchError) -> None:
        """Handle a mismatch of `posted`, for which `handle` waited.

        The handle fails, or it is posted again.
        """

    def await_decision(self, handle: "NamedHandle", timeout: float | None) -> bool:
        """Wait for `handle` to be posted or to end.

        Return True then, and False after `timeout` seconds.
        """

    def give_up(self, handle: "NamedHandle", error: StallError) -> None:
        """Make all operations of the set fail with `error`, on all ranks."""

    def drop(self, handle: "NamedHandle") -> None:
        """Release a handle that is over, and the memory that it holds."""


class NamedHandle(Waiter):
    """The handle of a named operation, or of a join.

    `wait` and `done` may be called from any thread. All other changes require the keeper's lock.
    """

    def __init__(self, keeper: Keeper, name: str, signature: Signature, start: Start | None) -> None:
        self._keeper = keeper
        self.name = name
        self.signature = signature
        self.start = start  # None for a join
        self.posted: Handle | None = None
        self.number = 0  # the number in the optimistic order; 0 if the operation has none
        self.is_over = False
        self.is_report = False  # it tells of a failure, and nobody need wait for it
        self.waited_us = 0  # how long a join waited before the negotiation started, in microseconds
        self.watch: Callable[[], tuple[Sequence[int], float]] | None = None  # set while a thread waits for a decision
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_lingered = False

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the world ranks to wait for, and the seconds without progress."""
        watch = self.watch
        return ([], 0.0) if watch is None else watch()

    @property
    def key(self) -> Key | None:
        """The operation's identity before the ranks agree on it.

        The key is None once the operation is posted.
        """
        return ("name", self._keeper.id, self.name) if self.posted is None else None

    @property
    def members(self) -> Sequence[int]:
        """The world ranks of the set."""
        return self._keeper.ranks

    def give_up(self, silent: int) -> None:
        """Fail the operation on all ranks with a StallError about world rank `silent`."""
        text = f"{self.title}: nothing came from rank {silent}{self.verdict}; the operation has not run"
        self._keeper.give_up(self, StallError(text))

    @property
    def title(self) -> str:
        """A description of the operation for warnings and errors."""
        return f"operation {self.name!r}" if self.start is not None else "join"

    @property
    def repeatable(self) -> Posted | None:
        """The posted form for `NamedOperations.submit_again`.

        The value is None if the operation cannot be repeated.
        """
        return self.posted.posted if isinstance(self.posted, OperationHandle) else None

    def fail(self, error: BaseException) -> None:
        """End the operation: `wait` will raise `error`."""
        self._error = error
        self.is_over = True

    def finish(self, result: Any) -> None:
        """End the operation: `wait` will return `result`."""
        self._result = result
        self.is_over = True

    def _refuse_fork(self) -> None:
        if self._keeper.generation.is_inherited:
            raise self._keeper.generation.error(self.title)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if self.is_over:
            return True
        self._refuse_fork()
        posted = self.posted
        if posted is None or not posted.done():
            return self.is_over
        try:
            self.finish(posted.wait(0))
        except MismatchError as error:
            self._keeper.settle(self, posted, error)
        except MultiringError as error:
            self.fail(error)
        return self.is_over

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`.

        Raises:
            DisagreementError: the ranks submitted the operation with different signatures; the inputs are intact.
        """
        self._refuse_fork()
        started_s = time.monotonic() if timeout is not None else 0.0
        left = timeout
        while not self.is_over:
            posted = self.posted
            if posted is None:
                if not self._keeper.await_decision(self, left):
                    raise TimeoutError(f"{self.title} is still in flight after {timeout:g} s")
            else:
                try:
                    self.finish(posted.wait(left))
                except MismatchError as error:
                    self._keeper.settle(self, posted, error)
                except MultiringError as error:
                    self.fail(error)
            if timeout is not None:
                left = max(0.0, timeout - (time.monotonic() - started_s))
        if isinstance(self._error, StallError) and not self._has_lingered:
            # The failure is still being reported to the other ranks. If this rank left at once, they might report its
            # departure as the cause.
            self._has_lingered = True
            time.sleep(LINGER_S)
        self._keeper.drop(self)
        if self._error is not None:
            raise self._error
        return self._result


class HandlesByName:
    """The operations of a set that are in flight here, and some that have ended.

    The caller holds the keeper's lock.
    """

    def __init__(self) -> None:
        self._handles: dict[str, NamedHandle] = {}
        self._sweep_at = _FEW

    def is_free(self, name: str) -> bool:
        """Return whether no operation of this name is in flight."""
        earlier = self._handles.get(name)
        return earlier is None or earlier.done()

    def report_of(self, name: str) -> NamedHandle | None:
        """Return the report of a failure that has this name and is in flight; None if there is none."""
        earlier = self._handles.get(name)
        return earlier if earlier is not None and earlier.is_report and not earlier.done() else None

    def has(self, name: str) -> bool:
        """Return whether an operation of this name is in flight here."""
        handle = self._handles.get(name)
        return handle is not None and not handle.is_over

    def add(self, handle: NamedHandle) -> None:
        """Add a handle. It replaces an earlier handle of the same name."""
        self._handles[handle.name] = handle
        if len(self._handles) > self._sweep_at:
            self._handles = {name: each for name, each in list(self._handles.items()) if not each.done()}
            self._sweep_at = max(_FEW, 2 * len(self._handles))

    def drop(self, handle: NamedHandle) -> None:
        """Release a handle, unless another handle has its name already."""
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]

    def find(self, number: int, joining: NamedHandle | None) -> NamedHandle | None:
        """Return the open handle with this number in the optimistic order.

        The handle may be `joining`.
        """
        handles = (*self._handles.values(), *(() if joining is None else (joining,)))
        return next((each for each in handles if each.number == number and not each.is_over), None)

    def has_unknown(self) -> bool:
        """Return whether an operation of the optimistic order has no known outcome yet."""
        return any(each.number and not each.done() for each in list(self._handles.values()))

    def abort(self, culprit: int) -> None:
        """Make all posted operations fail, because rank `culprit` aborted the group."""
        for handle in self._handles.values():
            if isinstance(handle.posted, OperationHandle) and not handle.done():
                handle.posted.abort(culprit)
