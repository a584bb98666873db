"""Elastic training: a program commits its state, and resumes from the last commit after a failure.

The membership is fixed: a job resumes with its original ranks. A rank that lost its connections joins the other ranks
again. If a rank is gone for good, the job ends.
"""

import contextlib
import copy
import functools
import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntFlag
from typing import Any, TypeVar

from multiring._frontend.consistency_check import refuse_difference
from multiring._frontend.elastic.own import OwnAttribute, OwnPart, OwnValue, Randomness
from multiring._frontend.elastic.own_states import OwnStates
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.errors import OperationError
from multiring.errors import CollectiveError, MultiringError

Result = TypeVar("Result")
Broadcast = Callable[[Any], Any]  # this rank's object -> rank 0's object
Gather = Callable[[Any], Sequence[Any]]  # this rank's object -> all ranks' objects, by rank

_log = logging.getLogger("multiring")
# Added to the HostUpdateResult of a rank that leaves at this commit.
LEAVES = 4
# The training gives up after this number of failures in a row without a commit.
_MOST_FAILURES = 10


class HostUpdateResult(IntFlag):
    """The kind of a change of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 -- Horovod's name
    """The hosts changed, so the ranks must join the job again.

    `skip_sync` is True if no rank is new, so no rank needs the state of another rank.
    """

    def __init__(self, skip_sync: bool) -> None:  # noqa: FBT001 -- Horovod's signature
        super().__init__(f"the hosts changed{', none was added' if skip_sync else ''}")
        self.skip_sync = skip_sync
        self.leaving: tuple[int, ...] = ()  # the ranks that leave now


class State:
    """The state of a program that can be committed and restored.

    Subclasses define its contents.
    """

    def __init__(
        self, bcast_object: Broadcast, get_rank: Callable[[], int], gather_object: Gather | None = None
    ) -> None:
        """Create a state without a commit.

        Args:
            bcast_object: returns rank 0's object on every rank.
            get_rank: returns this rank's number.
            gather_object: returns the objects of all ranks, by rank. Without it, only rank 0's information counts.
        """
        self._bcast_object = bcast_object
        self._gather_object = gather_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._host_changes: Callable[[], int] | None = None
        self._commits = 0
        self._sync_root = 0
        self._is_compared = False  # whether the ranks have compared the parts of their states for a `sync`
        self._own = OwnStates(self._own_parts, self._saved)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions to call each time the ranks have joined the job again.

        The functions are called before the state is synchronised.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the registered callbacks, after the ranks have joined the job again."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def watch_hosts(self, changes: Callable[[], int]) -> None:
        """Have `check_host_updates` ask `changes` for a HostUpdateResult, with LEAVES if this rank leaves."""
        self._host_changes = changes

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that the hosts changed. Any thread may call it.

        Args:
            timestamp: the time of the change.
            update_res: the kind of the change, a HostUpdateResult.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the current state, then check whether the hosts changed.

        If ranks have own parts (`OwnValue`), copies of them go to other ranks while the training goes on. Until all of
        these are whole, the former commit counts.

        Raises:
            HostsUpdatedInterrupt: on every rank: the hosts changed.
        """
        self._commit()
        self._check_host_updates(is_committed=True)

    def _commit(self) -> None:
        self._meet()
        if self._own:
            self._own.commit(self.save)
        else:
            self.save()
            self._own.forget()
        self._commits += 1

    def check_host_updates(self) -> None:
        """Check whether `on_hosts_updated` was called on any rank.

        Every rank must call it.

        Raises:
            HostsUpdatedInterrupt: on every rank, with the same `skip_sync`: the hosts changed.
        """
        self._check_host_updates(is_committed=False)

    def _check_host_updates(self, *, is_committed: bool) -> None:
        newest, changes = self._last_updated_timestamp, int(HostUpdateResult.no_update)
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            newest = max(newest, timestamp)
            if timestamp > self._last_updated_timestamp:
                changes |= int(change)
        if self._host_changes is not None and (change := self._host_changes()):
            newest = max(newest + 1e-6, time.time())
            changes |= change
        heard = (self._last_updated_timestamp, newest, changes)
        told = [self._bcast_object(heard)] if self._gather_object is None else self._gather_object(heard)
        before = max(each[0] for each in told)
        self._last_updated_timestamp = max(each[1] for each in told)
        if self._last_updated_timestamp > before:
            if self._own:  # ranks may leave now, and hand their parts over
                if not is_committed:
                    self._commit()
                self._own.settle()
            all_changes = functools.reduce(int.__or__, [each[2] for each in told]) & ~LEAVES
            interrupt = HostsUpdatedInterrupt(all_changes == HostUpdateResult.removed)
            interrupt.leaving = tuple(rank for rank, each in enumerate(told) if each[2] & LEAVES)
            raise interrupt

    def must_sync(self, *, wanted: bool) -> bool:
        """Return whether any rank wants to synchronise, for example a new rank, and choose `sync_root`.

        All ranks get the same result.

        Raises:
            MismatchError: on every rank: the ranks' states have different parts.
        """
        if self._gather_object is None:
            return wanted
        own = (wanted, self._commits, self._own.kept() if self._own else None, self._structure())
        told = self._gather_object(own)
        self._refuse_difference([structure for *_, structure in told])
        decided = self._own.decide([kept for _, _, kept, _ in told], self._rank()) if self._own else None
        if decided is not None:
            self._sync_root, is_changed = decided
            if is_changed or any(wants for wants, *_ in told):
                return True
            self._own.stay()
            return False
        # Rank 0 may be a new process in place of one that was killed. Without a commit, it has nothing to give. If a
        # rank was lost during a commit, some ranks have it already.
        commits = [each for _, each, *_ in told]
        self._sync_root = commits.index(max(commits))
        return any(wants for wants, *_ in told)

    def synchronize(self) -> None:
        """Call `sync`, and give each rank its own parts of the commit to which the ranks go back; see `must_sync`."""
        with self._as_compared():
            if not self._own:
                self.sync()
                return
            record = self._own.former_record()
            if record is not None:
                self._set_saved(record)
                self.restore()
            self.sync()
        self._own.take_back(lambda: None, self._rank())

    @contextlib.contextmanager
    def _as_compared(self) -> Iterator[None]:
        """Have every `sync` in the block take the ranks' states for compared."""
        before, self._is_compared = self._is_compared, True
        try:
            yield
        finally:
            self._is_compared = before

    def _refuse_difference(self, structures: Sequence[Sequence[str]]) -> None:
        refuse_difference(f"elastic.{type(self).__name__}", structures)

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        """Compare the parts of the ranks' states before the block, which is the body of a `sync`.

        `elastic.run` has compared them in `must_sync`, and one `sync` may call another one. They compare only once.
        Every rank calls it.

        Raises:
            MismatchError: on every rank: the ranks' states have different parts. Nothing has changed then.
        """
        if not self._is_compared and self._gather_object is not None:
            self._refuse_difference(self._gather_object(self._structure()))
        with self._as_compared():
            yield

    def restore_all(self) -> None:
        """Call `restore`, and set this rank's own parts to those of its last commit."""
        self.restore()
        if self._own:
            self._own.restore()

    def _meet(self) -> None:
        """Exchange what the ranks decide on at commits."""

    def _structure(self) -> list[str]:
        """Return descriptions of the state's parts, which are the same on all ranks."""
        return []

    def _own_parts(self) -> Mapping[str, OwnPart]:
        """Return the parts of the state of which each rank has its own, by name."""
        return {}

    def _saved(self) -> Any:
        """Return what was saved last: references, no copies."""
        return None

    def _set_saved(self, saved: Any) -> None:
        """Take an earlier result of `_saved` as what was saved last."""

    @property
    def sync_root(self) -> int:
        """The rank whose state all ranks take in `sync`: rank 0, or the first one with a commit if rank 0 has none."""
        return self._sync_root

    def save(self) -> None:
        """Save the current state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the state of every rank to that of rank `sync_root`, and save it.

        A subclass does so inside `self._comparing()`, so that no rank takes the values of a state with other parts.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Update the parts of the state that depend on the ranks.

        It is called after the ranks have joined the job again.
        """


@contextlib.contextmanager
def all_or_nothing(*holders: object) -> Iterator[None]:
    """Restore the attributes of `holders` if the block raises.

    A state then never mixes two commits.
    """
    before = [(kept, dict(kept)) for kept in (getattr(each, "__dict__", {}) for each in holders)]
    try:
        yield
    except BaseException:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)
        raise


class ObjectState(State):
    """A state of plain objects, each an attribute.

    All ranks have the same, but for those that are given as an `OwnValue` or a `Randomness`.
    """

    _SAVED: tuple[str, ...] = ("_saved_state",)  # the attributes with what was saved last

    def __init__(
        self,
        bcast_object: Broadcast,
        get_rank: Callable[[], int],
        gather_object: Gather | None = None,
        **kwargs: Any,
    ) -> None:
        """Set `kwargs` as attributes, and save them. For the other arguments see State."""
        super().__init__(bcast_object=bcast_object, get_rank=get_rank, gather_object=gather_object)
        self._parts: dict[str, OwnPart] = {}
        alike: dict[str, Any] = {}
        for name, value in kwargs.items():
            if isinstance(value, OwnValue):
                self._parts[name] = OwnAttribute(self, name, value.rearranged)
                self._set_attributes({name: value.value})
            elif isinstance(value, Randomness):
                self._parts[name] = value
                self._set_attributes({name: value})
            else:
                alike[name] = value
        self._saved_state = copy.deepcopy(alike)
        self._set_attributes(alike)

    def save(self) -> None:
        """Save copies of the attributes."""
        self._saved_state = copy.deepcopy(self._attributes())

    def restore(self) -> None:
        """Set the attributes to copies of the saved values."""
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes to the values of rank `sync_root`, and save them.

        Raises:
            MismatchError: on every rank: the ranks' states have different attributes.
        """
        with self._comparing():
            if not self._saved_state:
                return
            own, gather = self._attributes(), self._gather_object
            self._set_attributes(gather(own)[self.sync_root] if gather and self.sync_root else self._bcast_object(own))
            self._saved_state = copy.deepcopy(self._attributes())

    def _meet(self) -> None:
        for value in self._attributes().values():
            if isinstance(value, SpeedShares) and self._gather_object is not None:
                value.meet(self._gather_object)

    def _structure(self) -> list[str]:
        own = [f"attribute {name!r}, which each rank has for itself" for name in sorted(self._parts)]
        return [*(f"attribute {name!r}" for name in sorted(self._saved_state)), *own]

    def _own_parts(self) -> Mapping[str, OwnPart]:
        return self._parts

    def _saved(self) -> Any:
        return {name: getattr(self, name) for name in self._SAVED}

    def _set_saved(self, saved: Any) -> None:
        vars(self).update(saved)

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run_fn(
    func: Callable[..., Result],
    reset: Callable[[], object],
    failures: tuple[type[Exception], ...] = (OperationError,),
) -> Callable[..., Result]:
    """Return a function that calls `func`, resumes after failures, and returns its result.

    The state is synchronised before each call of `func`. `func` may raise one of `failures`, or an error after which
    its Group is unusable. Then `reset` is called and the last commit is restored, even if `reset` fails. If a rank is
    lost during `reset` or `on_reset`, the ranks join once more. After a HostsUpdatedInterrupt, `reset` is called and
    the state stays as it is.

    Args:
        func: takes a state, followed by any arguments.
        reset: makes the ranks leave the job and join it again.
        failures: the errors after which the training resumes.

    Raises:
        Exception: `func` raised another error, or failed ten times without a commit in between; or `reset` failed, for
            example because a rank is gone for good.
    """
    caught: tuple[type[Exception], ...] = (*failures, MultiringError)
    while_joining: tuple[type[Exception], ...] = (*failures, CollectiveError)

    @functools.wraps(func)
    def wrapper(state: Any, *arguments: Any, **keywords: Any) -> Result:
        wants_sync = True
        failures_in_a_row = _FailuresInARow(state)
        while True:
            goes_back = False
            try:
                if _must_sync(state, wanted=wants_sync):
                    _synchronize(state)
                return func(state, *arguments, **keywords)
            except HostsUpdatedInterrupt as interrupt:
                wants_sync = not interrupt.skip_sync
                _log.info("%s: the ranks join the job again", interrupt)
            except caught as error:
                if _leaves_group_usable(error, failures) or failures_in_a_row.are_too_many():
                    raise
                _log.warning("resuming from the last commit after %s: %s", type(error).__name__, error)
                wants_sync, goes_back = True, True
            while True:
                try:
                    _join_again(state, reset, goes_back=goes_back)
                    break
                except while_joining as error:  # a rank was lost meanwhile
                    if _leaves_group_usable(error, failures) or failures_in_a_row.are_too_many():
                        raise
                    _log.warning("joining once more after %s: %s", type(error).__name__, error)
                    wants_sync, goes_back = True, True

    return wrapper


def _leaves_group_usable(error: Exception, failures: tuple[type[Exception], ...]) -> bool:
    """Return whether joining again would not help: the error is none after which the training resumes."""
    return isinstance(error, MultiringError) and not isinstance(error, failures) and error.group_usable


class _FailuresInARow:
    """Counts failures of a training without a commit in between."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._number, self._commits = 0, None

    def are_too_many(self) -> bool:
        """Count a failure; return whether the training must give up."""
        now = getattr(self._state, "_commits", None)
        self._number = self._number + 1 if now == self._commits else 1
        self._commits = now
        return self._number >= _MOST_FAILURES


def _join_again(state: Any, reset: Callable[[], object], *, goes_back: bool) -> None:
    try:
        reset()
    finally:
        # Do not restore before `reset`: a suspended rank may write into memory of the failed operation until it
        # rejoins.
        if goes_back:
            (state.restore_all if isinstance(state, State) else state.restore)()
    state.on_reset()


def _synchronize(state: Any) -> None:
    (state.synchronize if isinstance(state, State) else state.sync)()


def _must_sync(state: Any, *, wanted: bool) -> bool:
    return state.must_sync(wanted=wanted) if isinstance(state, State) else wanted
