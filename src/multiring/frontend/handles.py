"""Handles: integers for operations that were submitted, as Horovod has them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from multiring.errors import ArgumentError, MultiringError, Signature
from multiring.frontend.errors import internal
from multiring.frontend.process_sets import Members
from multiring.frontend.signatures import PART
from multiring.runtime.named.handle import NamedHandle, Start


class Unnamed(NamedTuple):
    """In place of a name: the number that the ranks count alike, and which of the operations of that number it is."""

    number: str
    ending: str


Name = str | Unnamed | None


class Pending:
    """An operation that was submitted and not synchronized yet."""

    __slots__ = ("_finish", "_handle", "_members", "_name", "_what")

    def __init__(
        self, members: Members, name: str, what: str, handle: NamedHandle, finish: Callable[[Any], Any]
    ) -> None:
        self._members = members
        self._name = name
        self._what = what
        self._handle = handle
        self._finish = finish

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once. Its name is free then."""
        if not self._handle.done():
            return False
        self._members.in_flight.discard(self._name)
        return True

    def wait(self) -> Any:
        """Return the operation's result.

        Raises:
            HorovodInternalError: on every rank: they disagree, or one is gone.
        """
        try:
            found = self._handle.wait()
        except MultiringError as error:
            raise internal(error, self._what) from error
        finally:
            self._members.in_flight.discard(self._name)
        return self._finish(found)

    def forget(self) -> None:
        """Free the name of what nobody waits for any more."""
        self._members.in_flight.discard(self._name)

    def repeat(self) -> "Repeat | None":
        """Return what starts it again; None where it cannot be started as it was."""
        handle = self._handle
        return None if handle.repeatable is None else Repeat(self._members, self._what, handle)


@dataclass(frozen=True, slots=True)
class Repeat:
    """An operation that this thread waited for, and may do so again; its handle remembers it."""

    _members: Members
    _what: str
    _handle: NamedHandle

    def start(self) -> Pending | None:
        """Start it once more; None: not as it was, and nothing was done. This thread waits for it next."""
        members, name = self._members, self._handle.name
        if name in members.in_flight:
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
        return Pending(members, name, self._what, handle, _as_it_is)


def _as_it_is(result: Any) -> Any:
    return result


class Several:
    """Operations that are one to the caller."""

    __slots__ = ("_finish", "_parts")

    def __init__(self, parts: Sequence["Pending | Several"], finish: Callable[[list[Any]], Any]) -> None:
        self._parts = parts
        self._finish = finish

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once. Its name is free then."""
        return all(part.done() for part in self._parts)

    def wait(self) -> Any:
        """Return the results; where one fails, nothing is to be had of the others, which may not come on every rank."""
        left = list(reversed(self._parts))
        found = []
        try:
            while left:
                found.append(left.pop().wait())
        finally:
            for part in left:
                part.forget()
        return self._finish(found)

    def forget(self) -> None:
        """Free the name of what nobody waits for any more."""
        for part in self._parts:
            part.forget()


class _Handles:
    """The operations that were submitted and not synchronized yet, by handle."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.pending: dict[int, Pending | Several] = {}


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
        members: of the set.
        name: what the ranks match it by; by default the number that the ranks count alike.
        signature: what they have to agree on.
        start: posts the collective.
        finish: makes the operation's result of the collective's.
        at_once: posts the collective where the caller waits for it next.

    Raises:
        ArgumentError: an operation of this name was submitted and not synchronized yet.
    """
    operation = signature[0][1]
    # Without a name, ranks that come with different operations are to see that they do.
    if name is None:
        name = Unnamed(members.next_number(), "")
    if isinstance(name, Unnamed):
        full_name = f"noname.{name.number}{name.ending}"
        what = f"{operation}.{full_name}"
    else:
        what = full_name = f"{operation}.{name}"
    if full_name in members.in_flight:
        raise ArgumentError(
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
            f"currently being processed: {what}. Synchronize its handle first, or pass another name"
        )
    members.in_flight.add(full_name)
    try:
        handle = members.named.submit(full_name, signature, start, at_once)
    except BaseException as error:
        members.in_flight.discard(full_name)
        if isinstance(error, MultiringError) and not isinstance(error, ArgumentError):
            raise internal(error, what) from error
        raise
    return Pending(members, full_name, what, handle, finish)


def handle_of(pending: Pending | Several) -> int:
    """Return a handle for what was submitted."""
    number = next(_handles.numbers)
    _handles.pending[number] = pending
    return number


def synchronize(handle: int) -> Any:
    """Return the result of the operation with this handle once it has ended; None where the handle is not known.

    Raises:
        HorovodInternalError: on every rank: they disagree (inputs are intact), or one is gone.
    """
    pending = _handles.pending.pop(handle, None)
    return None if pending is None else pending.wait()


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return, or raise, at once.

    Raises:
        ArgumentError: the handle is not known (any more).
    """
    pending = _handles.pending.get(handle)
    if pending is None:
        raise ArgumentError(f"Handle {handle!r} was not created or has been cleared.")
    return pending.done()


def parts_of(members: Members, name: Name, count: int) -> list[tuple[str | Unnamed, Signature]]:
    """Return a name for each of the `count` operations of a group, and the term that tells it from the others.

    Raises:
        ArgumentError: there are none.
    """
    if not count:
        raise ArgumentError("a group of no tensors: want at least one")
    names = names_of(members, name, [f"_{part}of{count}" for part in range(1, count + 1)])
    return [(each, ((PART, f"{part} of {count}"),)) for part, each in enumerate(names, 1)]


def names_of(members: Members, name: Name, endings: Sequence[str]) -> Sequence[str | Unnamed]:
    """Return names for several operations that are one to the caller, who may have given it a name."""
    if isinstance(name, Unnamed):
        return [Unnamed(name.number, name.ending + ending) for ending in endings]
    if name is not None:
        return [f"{name}{ending}" for ending in endings]
    number = members.next_number()
    # The first is like a single one: ranks that come with another operation are to see it.
    return [Unnamed(number, ending if place else "") for place, ending in enumerate(endings)]
