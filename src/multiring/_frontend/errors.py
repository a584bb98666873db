"""Errors of an adapter's failed operations.

A program written for Horovod catches `HorovodInternalError`, which is `CollectiveError`. A program written for
multiring catches `MismatchError`, `PeerLostError` and so on. Every error here has both as base classes. Its message has
Horovod's wording in addition to multiring's if the program imported `horovod`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multiring._frontend.horovod_words import speaks_horovod
from multiring._frontend.signatures import DATA_TYPE, OPERATION, REDUCTION, ROOT, SCALES, SHAPE, WHOLE_SHAPE
from multiring._runtime.group.handles import told_apart
from multiring._runtime.named.signature_text import DEVICE, STRUCTURE, first_difference, path_and_type, paths_in
from multiring.errors import (
    CollectiveError,
    DisagreementError,
    MismatchError,
    MultiringError,
    PeerLostError,
    StallError,
    StateError,
    UnsupportedError,
)

_SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)


HorovodInternalError = CollectiveError  # Horovod's name for it


class OperationError(CollectiveError):
    """An operation of an adapter failed; `elastic.run` restores the state and resumes."""


class _NamedForProgram:
    """Gives the error multiring's own name, such as `MismatchError`, if the program does not import `horovod`."""

    if not TYPE_CHECKING:  # type checkers shall see instances of the class that is called

        def __new__(cls, *arguments: Any, **_named: Any) -> Any:
            """Return an error whose class has Horovod's or multiring's name, depending on the program."""
            return super().__new__(_named_for_program(cls), *arguments)


class MismatchInternalError(_NamedForProgram, MismatchError, OperationError):
    """The ranks submitted an operation with different arguments; its inputs are unchanged."""


class RefusedInternalError(_NamedForProgram, UnsupportedError, OperationError):
    """All ranks asked for an unsupported operation, such as an allgather after a rank has joined."""

    group_usable = True
    is_argument = False  # whether native code reports an invalid argument


class PeerLostInternalError(_NamedForProgram, PeerLostError, OperationError):
    """A rank died or left."""


class StallInternalError(_NamedForProgram, StallError, OperationError):
    """A rank did not take part in time."""


class StateInternalError(_NamedForProgram, StateError, OperationError):
    """The operation is not possible now, for example after `shutdown`."""

    group_usable = True


class NotInitializedError(StateInternalError, ValueError):
    """A call came before `init` or after `shutdown`.

    In this case Horovod's queries raise ValueError, and its operations raise CollectiveError. This error is both.
    """


def _named_for_program(kind: Any) -> Any:
    plain = next((theirs for theirs, ours in _KINDS.items() if ours is kind), None)
    if plain is None or speaks_horovod():
        return kind
    if kind not in _plain_named:

        def reduced(error: Exception) -> tuple[Any, ...]:  # the unpickling process chooses the name again
            return kind, error.args, vars(error)

        inside = {"__module__": plain.__module__, "__doc__": plain.__doc__, "__reduce__": reduced}
        _plain_named[kind] = type(plain.__name__, (kind,), inside)
    return _plain_named[kind]


_plain_named: dict[Any, Any] = {}


class LoopOrderError(StateError, AssertionError):
    """The calls of a training loop have an order that loses gradients or counts them twice.

    It is an AssertionError because Horovod raises one.
    """


def not_initialized(error: StateError, *, was_before: bool) -> NotInitializedError:
    """Return the form of `error` that an adapter raises.

    `was_before` says that this process has called `init` and `shutdown` already.
    """
    if not speaks_horovod():
        left = "this process has left the job (shutdown): " if was_before else ""
        return NotInitializedError(f"{left}{error}, or init() of the framework's module, such as mt.init()")
    text = f"Horovod has not been initialized; use hvd.init(). {error}"
    return NotInitializedError(f"{_SHUT_DOWN} {text}" if was_before else text)


@contextmanager
def internal_errors(what: str = "") -> Iterator[None]:
    """Turn multiring's errors in the block into the matching OperationError.

    ArgumentError, for wrong arguments of this rank, passes unchanged.

    Args:
        what: the operation, for the error message.
    """
    try:
        yield
    except OperationError:
        raise
    except tuple(_KINDS) as error:
        raise internal(error, what) from error


def internal(error: MultiringError, what: str = "") -> CollectiveError:
    """Return `error` as the error of an adapter's operation.

    Its message has Horovod's phrase for the difference between the ranks.
    """
    kind = next((ours for theirs, ours in _KINDS.items() if isinstance(error, theirs)), CollectiveError)
    text = str(error)
    unnamed = _UNNAMED.search(text) if isinstance(error, StallError) else None
    if unnamed:
        text += f". {unnamed[0]} counts operations without a name: pass name=, and errors show that name"
    words = [_phrase_of(error), "" if what in text else what, text]
    return kind(": ".join(word for word in words if word))


_KINDS: dict[type[MultiringError], type[OperationError]] = {
    MismatchError: MismatchInternalError,
    PeerLostError: PeerLostInternalError,
    StallError: StallInternalError,
    StateError: StateInternalError,
    UnsupportedError: RefusedInternalError,
}
_UNNAMED = re.compile(r"'noname\.[^']*'")
# Horovod's controller uses these phrases; "{}" stands for the operation.
_PHRASES = {
    OPERATION: "Mismatched operations",
    DATA_TYPE: "Mismatched data types",
    SHAPE: "Mismatched {} tensor shapes",
    WHOLE_SHAPE: "Mismatched {} tensor shapes",
    REDUCTION: "Mismatched reduction operations",
    SCALES: "Mismatched prescale and/or postscale factors",
    ROOT: "Mismatched {} root ranks",
    DEVICE: "Mismatched CPU/GPU device selection",
}


def _phrase_of(error: MultiringError) -> str:
    if not isinstance(error, DisagreementError):
        return _SHUT_DOWN if speaks_horovod() and isinstance(error, StateError | PeerLostError) else ""
    by_rank = {rank: dict(signature) for rank, signature in error.signatures.items()}
    if not all(by_rank.values()):
        return "Mismatched operations"
    term, said = first_difference(error.signatures)
    if len(set(said.values())) < 2:
        return "Mismatched operations"
    if term == STRUCTURE and _have_equal_paths(by_rank):
        term = DATA_TYPE
    operation = next(iter(by_rank.values())).get(OPERATION, "").rpartition(" ")[2].upper()
    phrase = _PHRASES.get(term, f"Mismatched {term}").format(operation)
    return f"{phrase}: One rank differs from another: {told_apart(said)}" if speaks_horovod() else phrase


def _have_equal_paths(signatures: Mapping[int, Mapping[str, str]]) -> bool:
    """Return whether the structures have the same paths, so that they differ in types only."""
    found = [paths_in(each.get(STRUCTURE)) for each in signatures.values()]
    return None not in found and len({tuple(path_and_type(text)[0] for text in each or ()) for each in found}) == 1
