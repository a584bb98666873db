"""Locks and other state that a forked process makes anew.

A fork has none of its parent's other threads. If one of them held a lock at the fork, nobody releases the lock in the
fork, and a call there that needs it waits without end. Workers of torch's DataLoader are such forks. They use the data
sets of the rank while other threads of the rank use them, too.
"""

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol


class BegunInForks(Protocol):
    """An object with state that a forked process must not take over."""

    def begin_in_fork(self) -> None:
        """Make locks anew, and drop state that another thread may have left half changed.

        It runs before any other code of the fork, and must take no lock.
        """


_known: "weakref.WeakSet[BegunInForks]" = weakref.WeakSet()


def begun_in_forks(owner: BegunInForks) -> None:
    """Call `owner.begin_in_fork()` in every process that is forked from this one, as long as `owner` exists.

    A second call with the same object does nothing.
    """
    _known.add(owner)


def _begin() -> None:
    for each in list(_known):
        each.begin_in_fork()


os.register_at_fork(after_in_child=_begin)


class ForkSafeLock:
    """A lock of this process's threads that is free in a fork, whatever thread of the parent held it.

    The state that it guards must be usable at any moment, or its owner must drop the state in `begin_in_fork`.

    Args:
        reentrant: whether the thread that holds the lock may take it again.
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self._is_reentrant = reentrant
        self.begin_in_fork()
        begun_in_forks(self)

    def begin_in_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.RLock() if self._is_reentrant else threading.Lock()

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock, wait at most `timeout_s` seconds for it, and return whether this thread has it now."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        """Release the lock, which this thread has."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
