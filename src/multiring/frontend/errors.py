"""What failed operations raise here: Horovod's error, which is of multiring's kind as well.

A program written for Horovod catches `HorovodInternalError`; one written for multiring catches `MismatchError`,
`PeerLostError` and so on. Each error of a failed operation is both. It speaks of multiring; of Horovod as well where
the program imported that name.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multiring.errors import (
    DisagreementError,
    MismatchError,
    MultiringError,
    PeerLostError,
    StallError,
    StateError,
    UnsupportedError,
)
from multiring.frontend.horovod_words import speaks_horovod
from multiring.frontend.signatures import DATA_TYPE, OPERATION, REDUCTION, ROOT, SCALES, SHAPE, WHOLE_SHAPE
from multiring.runtime.group.handles import told_apart

_SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)


class HorovodInternalError(RuntimeError):
    """A collective failed on every rank that took part; `elastic.run` restores the state and goes on."""


class _NamedForProgram:
    """In a program that does not import `horovod`, an error goes by multiring's own name: `MismatchError` and so on."""

    if not TYPE_CHECKING:  # what it returns is of the class that was called

        def __new__(cls, *arguments: Any, **_named: Any) -> Any:
            """Return one that goes by the name which the program knows."""
            return super().__new__(_named_for_program(cls), *arguments)


class MismatchInternalError(_NamedForProgram, MismatchError, HorovodInternalError):
    """The ranks submitted one operation with different arguments; inputs are intact."""


class RefusedInternalError(_NamedForProgram, UnsupportedError, HorovodInternalError):
    """All ranks asked for what cannot be done, such as an allgather beside a rank that has joined."""

    is_argument = False  # native code has it as an invalid argument


class PeerLostInternalError(_NamedForProgram, PeerLostError, HorovodInternalError):
    """A rank died or left."""


class StallInternalError(_NamedForProgram, StallError, HorovodInternalError):
    """A rank did not take part in time."""


class StateInternalError(_NamedForProgram, StateError, HorovodInternalError):
    """The operation does not fit the moment, as after `shutdown`."""


class NotInitializedError(StateInternalError, ValueError):
    """Before `init`, or after `shutdown`. Horovod's queries raise ValueError then, its operations its own error."""


def _named_for_program(kind: Any) -> Any:
    plain = next((theirs for theirs, ours in _KINDS.items() if ours is kind), None)
    if plain is None or speaks_horovod():
        return kind
    if kind not in _plain_named:

        def reduced(error: Exception) -> tuple[Any, ...]:  # in the other process `kind` may go by its own name
            return kind, error.args, vars(error)

        inside = {"__module__": plain.__module__, "__doc__": plain.__doc__, "__reduce__": reduced}
        _plain_named[kind] = type(plain.__name__, (kind,), inside)
    return _plain_named[kind]


_plain_named: dict[Any, Any] = {}


class LoopOrderError(StateError, AssertionError):
    """A loop's calls come in an order that loses gradients, or counts them twice; an AssertionError, as in Horovod."""


def not_initialized(error: StateError, *, was_before: bool) -> NotInitializedError:
    """Return `error` for who asks an adapter; `was_before`: there was an `init`, and then `shutdown`."""
    if not speaks_horovod():
        left = "this process has left the job (shutdown): " if was_before else ""
        return NotInitializedError(f"{left}{error}, or init() of the framework's module, such as mt.init()")
    text = f"Horovod has not been initialized; use hvd.init(). {error}"
    return NotInitializedError(f"{_SHUT_DOWN} {text}" if was_before else text)


@contextmanager
def internal_errors(what: str = "") -> Iterator[None]:
    """Raise what fails within, and is no wrong argument of this rank alone, as the HorovodInternalError of its kind.

    Args:
        what: the operation, for the error.
    """
    try:
        yield
    except HorovodInternalError:
        raise
    except tuple(_KINDS) as error:
        raise internal(error, what) from error


def internal(error: MultiringError, what: str = "") -> HorovodInternalError:
    """Return the HorovodInternalError that says what `error` says, and names what ranks differ in as Horovod does."""
    kind = next((ours for theirs, ours in _KINDS.items() if isinstance(error, theirs)), HorovodInternalError)
    text = str(error)
    unnamed = _UNNAMED.search(text) if isinstance(error, StallError) else None
    if unnamed:
        text += f". {unnamed[0]} counts operations that were given no name: pass name=, and errors call them by it"
    words = [_phrase_of(error), "" if what in text else what, text]
    return kind(": ".join(word for word in words if word))


_KINDS: dict[type[MultiringError], type[HorovodInternalError]] = {
    MismatchError: MismatchInternalError,
    PeerLostError: PeerLostInternalError,
    StallError: StallInternalError,
    StateError: StateInternalError,
    UnsupportedError: RefusedInternalError,
}
_UNNAMED = re.compile(r"'noname\.[^']*'")
# Horovod's controller says these; "{}" is the operation.
_PHRASES = {
    OPERATION: "Mismatched operations",
    DATA_TYPE: "Mismatched data types",
    SHAPE: "Mismatched {} tensor shapes",
    WHOLE_SHAPE: "Mismatched {} tensor shapes",
    REDUCTION: "Mismatched reduction operations",
    SCALES: "Mismatched prescale and/or postscale factors",
    ROOT: "Mismatched {} root ranks",
}


def _phrase_of(error: MultiringError) -> str:
    if not isinstance(error, DisagreementError):
        return _SHUT_DOWN if speaks_horovod() and isinstance(error, StateError | PeerLostError) else ""
    by_rank = {rank: dict(signature) for rank, signature in error.signatures.items()}
    if not all(by_rank.values()):
        return "Mismatched operations"
    for term in next(iter(by_rank.values())):
        said = {rank: signature.get(term, "nothing") for rank, signature in by_rank.items()}
        if len(set(said.values())) > 1:
            operation = next(iter(by_rank.values())).get(OPERATION, "").rpartition(" ")[2].upper()
            phrase = _PHRASES.get(term, f"Mismatched {term}").format(operation)
            return f"{phrase}: One rank differs from another: {told_apart(said)}" if speaks_horovod() else phrase
    return "Mismatched operations"
