"""Elastic training: what a program keeps of itself, so that it goes on after a failure from where it last committed.

Membership is fixed: the ranks that began are those that go on. A rank that lost the others meets them anew; a rank that
is gone for good ends the job.
"""

import contextlib
import copy
import functools
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntFlag
from typing import Any, TypeVar

from multiring.errors import MultiringError
from multiring.frontend.errors import HorovodInternalError

Result = TypeVar("Result")
Broadcast = Callable[[Any], Any]  # an object of this rank -> rank 0's
Gather = Callable[[Any], Sequence[Any]]  # an object of this rank -> all ranks', by rank

_log = logging.getLogger("multiring")
# Failures in a row, with no commit in between: what fails so often will do so for ever.
_MOST_FAILURES = 10


class HostUpdateResult(IntFlag):
    """What became of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 -- Horovod's name
    """The hosts changed: the ranks meet anew. `skip_sync`: no rank is new, so that none needs the others' state."""

    def __init__(self, skip_sync: bool) -> None:  # noqa: FBT001 -- Horovod's signature
        super().__init__(f"the hosts changed{', none was added' if skip_sync else ''}")
        self.skip_sync = skip_sync


class State:
    """What a program keeps of itself; what that is, and how, subclasses say."""

    def __init__(
        self, bcast_object: Broadcast, get_rank: Callable[[], int], gather_object: Gather | None = None
    ) -> None:
        """Keep nothing yet.

        Args:
            bcast_object: returns rank 0's object on every rank.
            get_rank: returns this rank.
            gather_object: returns every rank's object, by rank. Without it ranks believe rank 0 alone.
        """
        self._bcast_object = bcast_object
        self._gather_object = gather_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have `callbacks` called each time the ranks have met anew, before the state is synchronised."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Take note that the ranks have met anew."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take note that the hosts changed at `timestamp`, in the way that HostUpdateResult has; from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the state as it is now, then look whether the hosts changed.

        Raises:
            HostsUpdatedInterrupt: they did; on every rank.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Look whether any rank heard that the hosts changed; every rank has to.

        Raises:
            HostsUpdatedInterrupt: one did; on every rank, with the same `skip_sync`.
        """
        newest, changes = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            newest = max(newest, timestamp)
            if timestamp > self._last_updated_timestamp:
                changes |= HostUpdateResult(change)
        heard = (self._last_updated_timestamp, newest, int(changes))
        told = [self._bcast_object(heard)] if self._gather_object is None else self._gather_object(heard)
        before = max(each[0] for each in told)
        self._last_updated_timestamp = max(each[1] for each in told)
        if self._last_updated_timestamp > before:
            all_changes = functools.reduce(int.__or__, [each[2] for each in told])
            raise HostsUpdatedInterrupt(all_changes == HostUpdateResult.removed)

    def must_sync(self, *, wanted: bool) -> bool:
        """Return whether any rank wants to synchronise, as a rank that is new to the others does; the same on all."""
        return wanted if self._gather_object is None else any(self._gather_object(wanted))

    def save(self) -> None:
        """Keep the state as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the state what it was when it was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state rank 0's on every rank, and keep it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Fit what depends on the ranks to those there are now."""


@contextlib.contextmanager
def all_or_nothing(*holders: object) -> Iterator[None]:
    """Restore the attributes of `holders` if the block raises, so that a state never mixes two commits."""
    before = [(kept, dict(kept)) for kept in (getattr(each, "__dict__", {}) for each in holders)]
    try:
        yield
    except BaseException:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)
        raise


class ObjectState(State):
    """Plain objects, by name; each is an attribute."""

    def __init__(
        self,
        bcast_object: Broadcast,
        get_rank: Callable[[], int],
        gather_object: Gather | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep `kwargs`; for the others see State."""
        super().__init__(bcast_object=bcast_object, get_rank=get_rank, gather_object=gather_object)
        self._saved_state = copy.deepcopy(kwargs)
        self._set_attributes(kwargs)

    def save(self) -> None:
        """Keep copies of the attributes."""
        self._saved_state = copy.deepcopy(self._attributes())

    def restore(self) -> None:
        """Set the attributes to copies of what was kept."""
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes to rank 0's, and keep those."""
        if self._saved_state:
            self._set_attributes(self._bcast_object(self._attributes()))
            self._saved_state = copy.deepcopy(self._attributes())

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run_fn(
    func: Callable[..., Result],
    reset: Callable[[], object],
    failures: tuple[type[Exception], ...] = (HorovodInternalError,),
) -> Callable[..., Result]:
    """Return `func`, made to go on after a failure: `wrapper(state, *arguments)` returns what `func` returns at last.

    Each time before `func`, the state is synchronised. Where `func` raises one of `failures`, or an error after which
    its Group is unusable, the ranks meet anew, and then the state is what it was at the last commit, also where they do
    not meet; where it raises HostsUpdatedInterrupt, they meet anew with the state as it is.

    Args:
        func: takes a state, and whatever else.
        reset: makes the ranks meet anew.
        failures: errors to go on after.

    Raises:
        Exception: what `func` raised, where it is none of these, or after ten failures without a commit in between;
            what `reset` raised, as where a rank is gone for good.
    """
    caught: tuple[type[Exception], ...] = (*failures, MultiringError)

    @functools.wraps(func)
    def wrapper(state: Any, *arguments: Any, **keywords: Any) -> Result:
        wants_sync = True
        failed, commits = 0, None
        while True:
            goes_back = False
            try:
                if _must_sync(state, wanted=wants_sync):
                    state.sync()
                return func(state, *arguments, **keywords)
            except HostsUpdatedInterrupt as interrupt:
                wants_sync = not interrupt.skip_sync
                _log.info("%s: the ranks meet anew", interrupt)
            except caught as error:
                if isinstance(error, MultiringError) and not isinstance(error, failures) and error.group_usable:
                    raise
                now = getattr(state, "_commits", None)
                failed = failed + 1 if now == commits else 1
                commits = now
                if failed == _MOST_FAILURES:
                    raise
                _log.warning("going on from the last commit after %s: %s", type(error).__name__, error)
                wants_sync, goes_back = True, True
            try:
                reset()
            finally:
                # Not before: a rank that was stopped may write into memory of what failed until it has met the others.
                if goes_back:
                    state.restore()
            state.on_reset()

    return wrapper


def _must_sync(state: Any, *, wanted: bool) -> bool:
    return state.must_sync(wanted=wanted) if isinstance(state, State) else wanted
