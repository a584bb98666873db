"""Named operations: collectives that ranks may come to in different orders, matched by name."""

import threading
from collections.abc import Callable
from typing import Any

from multiring.errors import ArgumentError, MismatchError, Terms, UnsupportedError
from multiring.runtime.group import Group
from multiring.runtime.handles import Handle
from multiring.runtime.terms import disagreement, label_of, meaning_of

Start = Callable[[Group, str], Handle]  # posts a collective on that group, with that label

_FEW = 64  # names: fewer are not worth looking through for those whose operations have ended


class NamedOperations:
    """The named operations of one set of ranks. Its methods may be called from any thread.

    Args:
        group: the ranks; every one of them makes its own NamedOperations, in the same order among the group's.
        stand_in: what a rank that has joined contributes to an operation of these terms.
    """

    def __init__(self, group: Group, stand_in: Callable[[Terms], Start] | None = None) -> None:
        self._group = group.twin()
        self._stand_in = stand_in
        self._lock = threading.Lock()
        self._in_flight: dict[str, NamedHandle] = {}
        self._sweep_at = _FEW

    def submit(self, name: str, terms: Terms, start: Start) -> Handle:
        """Start an operation, and return its handle.

        Args:
            name: what the ranks match it by.
            terms: what they must agree on besides, in the order of checking.
            start: posts the collective.

        Raises:
            ArgumentError: an operation of this name is in flight here.
        """
        with self._lock:
            earlier = self._in_flight.get(name)
            if earlier is not None and not earlier.done():
                raise ArgumentError(
                    f"operation {name!r} is in flight already; wait for it, or give this one another name"
                )
            handle = NamedHandle(name, start(self._group, label_of(name, terms)))
            self._in_flight[name] = handle
            if len(self._in_flight) > self._sweep_at:
                self._in_flight = {key: each for key, each in self._in_flight.items() if not each.done()}
                self._sweep_at = max(_FEW, 2 * len(self._in_flight))
            return handle

    def join(self) -> Handle:
        """Take part in the others' operations with stand-ins until all ranks have joined."""
        raise UnsupportedError("join: the ranks cannot yet agree on an order that differs between them")

    def close(self) -> None:
        """Take no more operations; what is in flight goes on."""


class NamedHandle:
    """The handle of a named operation."""

    def __init__(self, name: str, posted: Handle) -> None:
        self._name = name
        self._posted = posted

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._posted.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`.

        Raises:
            DisagreementError: the ranks came to it with different terms; inputs are intact.
        """
        try:
            return self._posted.wait(timeout)
        except MismatchError as error:
            told = {rank: meaning_of(title) for rank, title in error.titles.items()}
            terms = {rank: meaning[1] for rank, meaning in told.items() if meaning and meaning[0] == self._name}
            if len(terms) == len(told) and len(set(terms.values())) > 1:
                raise disagreement(self._name, terms) from error
            raise
