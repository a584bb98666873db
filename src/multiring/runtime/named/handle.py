"""The handle of a named operation, which may be posted twice: as this rank came to it, and as the ranks agreed."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from multiring.errors import MismatchError, MultiringError, Signature, StallError
from multiring.runtime.group.group import Group
from multiring.runtime.group.handles import LINGER_S, Handle, Key, OperationHandle, Posted, Waiter

_FEW = 64  # names: fewer are not worth looking through for those whose operations have ended

Start = Callable[[Group, str], Handle]  # posts a collective on that group, with that label


class Keeper(Protocol):
    """Whose a handle is: the named operations of a set."""

    id: int  # of the set, the same on all ranks

    def settle(self, handle: "NamedHandle", posted: Handle, error: MismatchError) -> None:
        """Have `handle` fail, or be posted anew: what it waited for, `posted`, was called something else elsewhere."""

    def await_decision(self, handle: "NamedHandle", timeout: float | None) -> bool:
        """Return once `handle` is posted or over; False after `timeout` seconds."""

    def give_up(self, handle: "NamedHandle", error: StallError) -> None:
        """Have everything fail because of `error`, on all ranks."""


class NamedHandle(Waiter):
    """An operation, or a joining. What changes it holds the keeper's lock; `wait` and `done` may be called anywhere."""

    def __init__(self, keeper: Keeper, name: str, signature: Signature, start: Start | None) -> None:
        self._keeper = keeper
        self.name = name
        self.signature = signature
        self.start = start  # None: of a joining
        self.posted: Handle | None = None
        self.number = 0  # its place in the optimistic order; 0: it has none
        self.is_over = False
        self.waited_us = 0  # of a joining, in microseconds: before the ranks came to a negotiation
        self.watch: Callable[[], tuple[Sequence[int], float]] | None = None  # while a thread waits for a decision
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_lingered = False

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the ranks of the world that are waited for, and for how many seconds nothing has moved."""
        watch = self.watch
        return ([], 0.0) if watch is None else watch()

    @property
    def key(self) -> Key | None:
        """Of an operation whose ranks have yet to agree; else what it was posted as says more."""
        return ("name", self._keeper.id, self.name) if self.posted is None else None

    def give_up(self, silent: int) -> None:
        """Fail on all ranks, as if rank `silent` of the world had been silent for too long."""
        text = f"{self.title}: nothing came from rank {silent}{self.verdict}; it has not run"
        self._keeper.give_up(self, StallError(text))

    @property
    def title(self) -> str:
        """What is waited for, in words."""
        return f"operation {self.name!r}" if self.start is not None else "join"

    @property
    def repeatable(self) -> Posted | None:
        """What `NamedOperations.submit_again` posts once more; None where it cannot be posted as it was."""
        return self.posted.posted if isinstance(self.posted, OperationHandle) else None

    def fail(self, error: BaseException) -> None:
        """Be over: `wait` raises `error`."""
        self._error = error
        self.is_over = True

    def finish(self, result: Any) -> None:
        """Be over: `wait` returns `result`."""
        self._result = result
        self.is_over = True

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self.is_over:
            return True
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
            DisagreementError: the ranks came to it with different signatures; inputs are intact.
        """
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
            # Others are being told: were this rank to leave at once, they might take that for the cause.
            self._has_lingered = True
            time.sleep(LINGER_S)
        if self._error is not None:
            raise self._error
        return self._result


class HandlesByName:
    """The operations of a set that are in flight here, and some that have ended since. The keeper's lock is held."""

    def __init__(self) -> None:
        self._handles: dict[str, NamedHandle] = {}
        self._sweep_at = _FEW

    def is_free(self, name: str) -> bool:
        """Return whether no operation of this name is in flight."""
        earlier = self._handles.get(name)
        return earlier is None or earlier.done()

    def has(self, name: str) -> bool:
        """Return whether this rank has come to an operation of this name that has not ended."""
        handle = self._handles.get(name)
        return handle is not None and not handle.is_over

    def add(self, handle: NamedHandle) -> None:
        """Have one more in flight, in place of an earlier one of its name."""
        self._handles[handle.name] = handle
        if len(self._handles) > self._sweep_at:
            self._handles = {name: each for name, each in self._handles.items() if not each.done()}
            self._sweep_at = max(_FEW, 2 * len(self._handles))

    def find(self, number: int, joining: NamedHandle | None) -> NamedHandle | None:
        """Return the one, `joining` among them, that has this place in the optimistic order, and is not over."""
        handles = (*self._handles.values(), *(() if joining is None else (joining,)))
        return next((each for each in handles if each.number == number and not each.is_over), None)

    def has_unknown(self) -> bool:
        """Return whether it is not known yet what became of one that has a place in that order."""
        return any(each.number and not each.done() for each in list(self._handles.values()))

    def abort(self, culprit: int) -> None:
        """Have all that are posted fail on all ranks, as rank `culprit` of the world has aborted the group."""
        for handle in self._handles.values():
            if isinstance(handle.posted, OperationHandle) and not handle.done():
                handle.posted.abort(culprit)
