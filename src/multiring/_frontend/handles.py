"""Handles: integers that stand for submitted operations, as in Horovod."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from multiring._frontend.errors import internal
from multiring._frontend.process_sets import Members
from multiring._frontend.signatures import OPERATION, PART
from multiring._frontend.submission_line import Submission
from multiring._runtime import Group, Handle
from multiring._runtime.named.handle import NamedHandle, Start
from multiring._runtime.named.signature_text import DEVICE
from multiring.errors import ArgumentError, DisagreementError, MultiringError, Signature


class Unnamed(NamedTuple):
    """Replaces the name of an unnamed operation.

    number: counts unnamed operations; the same on all ranks.
    ending: distinguishes several operations with the same number.
    more: further terms on which the ranks must agree.
    """

    number: str
    ending: str
    more: Signature = ()


class Prefixed(NamedTuple):
    """The name of an operation that has a prefix of its own in place of the operation's name.

    more: further terms on which the ranks must agree.
    """

    prefix: str
    name: str
    more: Signature = ()


CallName = str | Unnamed | Prefixed


class Placed(NamedTuple):
    """The name of an operation whose tensors are on devices.

    name: the operation's name; the caller has reserved it.
    devices: the types of the tensors' devices, on which the ranks must agree.
    more: further terms on which they must agree.
    """

    name: CallName
    devices: str
    more: Signature = ()


Named = CallName | Placed
Name = Named | None


class Submitted(Protocol):
    """An operation, or several, for which the caller has not waited yet."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once. If so, the names can be used again."""

    def wait(self) -> Any:
        """Wait for the operation, and return its result; see `Pending`."""

    def forget(self) -> None:
        """Make the names usable again. The caller will not wait for the operation."""


class Pending:
    """A submitted operation for which the caller has not waited yet."""

    __slots__ = ("_finish", "_handle", "_members", "_name", "_what", "is_whole_group")

    def __init__(
        self, members: Members, name: str, what: str, handle: NamedHandle | Submission, finish: Callable[[Any], Any]
    ) -> None:
        self._members = members
        self._name = name
        self._what = what
        self._handle = handle
        self._finish = finish
        self.is_whole_group = False  # whether it is the only operation of a call with a group of tensors

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once.

        If so, the name can be used again.
        """
        if not self._handle.done():
            return False
        self._members.in_flight.discard(self._name)
        return True

    def wait(self) -> Any:
        """Wait for the operation, and return its result.

        Raises:
            CollectiveError: on every rank: the ranks' arguments differ, or a rank is gone.
        """
        try:
            found = self._handle.wait()
        except MultiringError as error:
            if self.is_whole_group:
                _fail_missing_parts(self._members, self._name, self._what, 1, error)
            raise internal(error, self._what) from error
        finally:
            self._members.in_flight.discard(self._name)
        return self._finish(found)

    def forget(self) -> None:
        """Make the name usable again. The caller will not wait for the operation."""
        self._members.in_flight.discard(self._name)

    def leave(self) -> None:
        """Make the name usable again, for an operation that fails because an earlier one of its call has failed."""
        self.forget()
        if isinstance(self._handle, NamedHandle):
            self._handle.is_report = True  # the next operation of this name waits for its end

    def repeat(self) -> "Repeat | None":
        """Return an object that starts the operation again; None if that is not possible."""
        handle = self._handle
        if isinstance(handle, Submission) or handle.repeatable is None:
            return None
        return Repeat(self._members, self._what, handle, self.is_whole_group)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repeats an operation for which this thread has waited.

    The operation's handle keeps the arguments.
    """

    _members: Members
    _what: str
    _handle: NamedHandle
    _is_whole_group: bool

    def start(self) -> Pending | None:
        """Start the operation once more; return None, and do nothing, if that is not possible.

        This thread must wait for the operation next.
        """
        members, name = self._members, self._handle.name
        if name in members.in_flight or members.line.is_ahead():
            return None
        members.in_flight.add(name)
        try:
            handle = members.named.submit_again(self._handle)
        except BaseException as error:
            members.in_flight.discard(name)
            if isinstance(error, MultiringError):
                raise internal(error, self._what) from error
            raise
        if handle is None:
            members.in_flight.discard(name)
            return None
        found = Pending(members, name, self._what, handle, _as_it_is)
        found.is_whole_group = self._is_whole_group
        return found


def _as_it_is(result: Any) -> Any:
    return result


class Several:
    """Several operations that look like one operation to the caller.

    `group` says which operations they are if they are the parts of a group.
    """

    __slots__ = ("_finish", "_group", "_parts")

    def __init__(
        self, parts: Sequence[Submitted], finish: Callable[[list[Any]], Any], group: "PartsOfGroup | None" = None
    ) -> None:
        self._parts = parts
        self._finish = finish
        self._group = group

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once.

        If so, the names can be used again.
        """
        return all(part.done() for part in self._parts)

    def wait(self) -> Any:
        """Wait for all operations, and return the result.

        If an operation fails, the later results are dropped: some ranks may never submit those operations.
        """
        left = list(reversed(self._parts))
        found = []
        try:
            while left:
                found.append(left.pop().wait())
        except MultiringError as error:
            if self._group is not None and not found:
                self._group.fail_missing(error)
                for part in left:
                    if isinstance(part, Pending):
                        part.leave()
            raise
        finally:
            for part in left:
                part.forget()
        return self._finish(found)

    def forget(self) -> None:
        """Make the names usable again. The caller will not wait for the operations."""
        for part in self._parts:
            part.forget()


class _Handles:
    """The submitted operations that the program has not synchronized, by handle."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.pending: dict[int, Submitted] = {}


_handles = _Handles()


def submit(
    members: Members,
    name: Name,
    signature: Signature,
    start: Start,
    finish: Callable[[Any], Any],
    at_once: Start | None = None,
) -> Pending:
    """Start an operation of a process set.

    Args:
        members: the ranks of the set.
        name: the ranks match the operation by this name. By default they match unnamed operations in order.
        signature: the arguments that must be equal on all ranks.
        start: posts the collective.
        finish: turns the collective's result into the operation's result.
        at_once: posts the collective if the caller waits for it next.

    Raises:
        ArgumentError: an operation of this name was submitted and has not been synchronized.
    """
    operation, is_reserved = signature[0][1], False
    if isinstance(name, Placed):
        signature, name, is_reserved = (*signature, (DEVICE, name.devices), *name.more), name.name, True
    # The name of an unnamed operation omits its kind. Different operations are then matched, and the mismatch reported.
    if name is None:
        name = Unnamed(members.next_number(), "")
    if not isinstance(name, str) and name.more:
        signature = (*signature, *name.more)
    full_name = full_name_of(name, operation)
    what = f"{operation}.{full_name}" if isinstance(name, Unnamed) else full_name
    if not is_reserved:
        refuse_in_flight(members, full_name, what)
    members.in_flight.add(full_name)
    if members.line.is_ahead():
        waiting = members.line.put(lambda: members.named.submit(full_name, signature, start))
        return Pending(members, full_name, what, waiting, finish)
    try:
        handle = members.named.submit(full_name, signature, start, at_once)
    except BaseException as error:
        members.in_flight.discard(full_name)
        if isinstance(error, MultiringError) and not isinstance(error, ArgumentError):
            raise internal(error, what) from error
        raise
    return Pending(members, full_name, what, handle, finish)


def full_name_of(name: CallName, operation: str) -> str:
    """Return the name by which a set knows an operation."""
    if isinstance(name, Unnamed):
        return f"noname.{name.number}{name.ending}"
    return f"{name.prefix}.{name.name}" if isinstance(name, Prefixed) else f"{operation}.{name}"


def with_ending(name: CallName, ending: str) -> CallName:
    """Return `name` with another ending after it."""
    if isinstance(name, Unnamed):
        return name._replace(ending=name.ending + ending)
    return name._replace(name=name.name + ending) if isinstance(name, Prefixed) else name + ending


def submit_failure(members: Members, full_name: str, what: str) -> Any:
    """Submit an operation that differs from the other ranks' one of this name, so that they raise an error, too.

    Args:
        members: the ranks of the set.
        full_name: the name by which the set knows the operation.
        what: the operation and what is wrong with it on this rank; part of the other ranks' error.

    Returns:
        an object with the method `wait`, which raises the error. It raises nothing if all ranks submit the same.
    """

    def start(group: Group, label: str) -> Handle:
        return group.barrier_async(label=label)

    signature = ((OPERATION, what),)
    if members.line.is_ahead():
        return members.line.put(lambda: members.named.submit(full_name, signature, start, is_report=True))
    return members.named.submit(full_name, signature, start, is_report=True)


def fail_call(members: Members, name: CallName | None, operation: str, error: Exception) -> Any:
    """Fail a call on the other ranks, which this rank cannot make because of `error`.

    They would otherwise wait for it, and take this rank's next call for it. The result is that of `submit_failure`.
    """
    known = Unnamed(members.next_number(), "") if name is None else name
    return submit_failure(members, full_name_of(known, operation), f"{operation} that failed: {error}")


def fail_operations(members: Members, name: CallName, operation: str, endings: Iterable[str], error: Exception) -> None:
    """Fail operations that other ranks submit and this rank does not, so that nobody waits for them.

    Args:
        members: the ranks of the set.
        name: the name of the call's first operation.
        operation: the operation of the call.
        endings: what the names of the operations add to `name`.
        error: the mismatch of the first operation.
    """
    names = [full_name_of(with_ending(name, ending), operation) for ending in endings]
    _fail_each(members, names, operation, error)


def _fail_each(members: Members, full_names: Iterable[str], operation: str, error: Exception) -> None:
    for each in full_names:
        with suppress(MultiringError):
            submit_failure(members, each, f"{operation}{_AFTER_MISMATCH}{error}")


def mismatch_before(error: Exception) -> str | None:
    """Return the text of the mismatch for which another rank has failed this operation; None for another error."""
    cause = error.__cause__
    for signature in cause.signatures.values() if isinstance(cause, DisagreementError) else ():
        _, separator, text = dict(signature).get(OPERATION, "").partition(_AFTER_MISMATCH)
        if separator:
            return text
    return None


_AFTER_MISMATCH = " that another rank does not have, after a mismatch: "


@dataclass(frozen=True, slots=True)
class PartsOfGroup:
    """The operations of one call with a group of tensors, as `parts_of` names them."""

    members: Members
    name: Named  # of the first operation
    operation: str
    count: int

    def fail_missing(self, error: Exception) -> None:
        """Fail the operations of other ranks that this rank's call does not have, if the first ones disagreed."""
        name = self.name.name if isinstance(self.name, Placed) else self.name
        full_name = full_name_of(name, self.operation)
        _fail_missing_parts(self.members, full_name, self.operation, self.count, error.__cause__)


def _fail_missing_parts(
    members: Members, full_name: str, operation: str, own: int, error: BaseException | None
) -> None:
    """Fail the parts of other ranks' groups that this rank's group of `own` parts does not have.

    `error` is that of the first part, of this full name. Nothing happens unless the ranks disagreed on this part.
    """
    if not isinstance(error, DisagreementError):
        return
    told = {dict(signature).get(PART, "1 of 1") for signature in error.signatures.values()}
    counts = {int(count) for count in (part.rpartition(" ")[2] for part in told) if count.isdecimal()}
    missing = [ending for count in sorted(counts - {own}) for ending in _endings(count)[1:]]
    _fail_each(members, [full_name + ending for ending in missing], operation, error)


def refuse_in_flight(members: Members, full_name: str, what: str) -> None:
    """Raise ArgumentError if an operation of this name was submitted and has not been synchronized.

    Args:
        members: the ranks of the set.
        full_name: the name by which the set knows the operation.
        what: the operation and its name, for the error.
    """
    if full_name in members.in_flight:
        raise ArgumentError(
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
            f"currently being processed: {what}. Synchronize its handle first, or pass another name"
        )


def handle_of(pending: Submitted) -> int:
    """Return a new handle for a submitted operation."""
    number = next(_handles.numbers)
    _handles.pending[number] = pending
    return number


def synchronize(handle: int) -> Any:
    """Wait for the operation with this handle, and return its result.

    The result is None if the handle is not known.

    Raises:
        CollectiveError: on every rank: the ranks' arguments differ (inputs are unchanged), or a rank is gone.
    """
    pending = _handles.pending.pop(handle, None)
    return None if pending is None else pending.wait()


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return or raise at once.

    Raises:
        ArgumentError: the handle is not known, or has been synchronized.
    """
    pending = _handles.pending.get(handle)
    if pending is None:
        raise ArgumentError(f"Handle {handle!r} was not created or has been cleared.")
    return pending.done()


def parts_of(members: Members, name: Name, count: int) -> list[tuple[Named, Signature]]:
    """Return a name and a signature term for each of the `count` operations of a group.

    Raises:
        ArgumentError: `count` is 0.
    """
    if not count:
        raise ArgumentError("a group of no tensors: want at least one")
    names = names_of(members, name, _endings(count))
    return [(each, ((PART, f"{part} of {count}"),)) for part, each in enumerate(names, 1)]


def _endings(count: int) -> list[str]:
    """Return the endings of the names of a group's operations.

    The first one has none, so the first operations of all ranks meet, whatever their numbers of operations.
    """
    return ["", *(f"_{part}of{count}" for part in range(2, count + 1))]


def names_of(members: Members, name: Name, endings: Sequence[str]) -> Sequence[Named]:
    """Return a name for each operation of one call.

    Each name is the call's name or number, followed by one of `endings`.
    """
    if isinstance(name, Placed):
        return [Placed(each, name.devices) for each in names_of(members, name.name, endings)]  # type: ignore[arg-type] # of a name, names
    if name is not None:
        return [with_ending(name, ending) for ending in endings]
    number = members.next_number()
    # The first name has no ending. It is then matched with a single operation of another rank, which is a mismatch.
    return [Unnamed(number, ending if place else "") for place, ending in enumerate(endings)]
