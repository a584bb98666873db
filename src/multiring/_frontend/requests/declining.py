"""Requests in which this rank cannot take part, or which it never makes. They fail on all ranks.

Otherwise the other ranks would wait, and take this rank's next operation of the same name for the one that failed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from multiring._frontend.errors import MismatchInternalError
from multiring._frontend.handles import (
    CallName,
    fail_call,
    fail_operations,
    mismatch_before,
)
from multiring._frontend.process_sets import Members
from multiring._frontend.requests.text import known_ending, numbered
from multiring._frontend.requests.wanted import COLLECTIVES, Wanted, name_for
from multiring._frontend.signatures import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    GROUPED_ALLREDUCE,
    OPERATION,
    REDUCESCATTER,
)
from multiring._native import Request
from multiring._runtime.named.signature_text import STRUCTURE, path_and_type, paths_in
from multiring.errors import ArgumentError, DisagreementError, MultiringError

BY_ROWS = {ALLGATHER, ALLTOALL, REDUCESCATTER}  # each array of such a call has its own operation

Finish = Callable[[Request], None]
"""Waits for an operation, and stores its results."""


class FailedOperation:
    """An operation in which this rank cannot take part. It fails on the other ranks, too."""

    def __init__(self, members: Members, wanted: Wanted) -> None:
        operation = COLLECTIVES[wanted.root]
        is_grouped = operation == ALLREDUCE and len(wanted.shapes) > 1
        self._operation = GROUPED_ALLREDUCE if is_grouped else operation
        self._members, self._name = members, name_for(wanted.sent_name, operation)
        self._error = ArgumentError(wanted.wire or "")

    def submit(self, request: Request) -> Finish:  # noqa: ARG002 -- part of the interface
        return declined(self._members, self._name, self._operation, self._error)


def declined(members: Members, name: CallName | None, operation: str, error: Exception) -> Finish:
    """Make an operation fail on all ranks, because of `error` on this one; return a function that raises `error`."""
    pending = fail_call(members, name, operation, error)

    def finish(_: Request) -> None:
        with suppress(MultiringError):
            pending.wait()
        raise error

    return finish


def endings_of(operation: str, paths: Sequence[str], *, is_in_turn: bool = False, is_named: bool = True) -> list[str]:
    """Return the endings of the names of a call's operations; the first one is "".

    Args:
        operation: the call's operation.
        paths: the paths and types of its arrays; see `CallSignature`. Empty for one array that is in no tree.
        is_in_turn: leave out the types behind the first one, because the call ends if the first one fails.
        is_named: whether the call has a name. Each type of another call in turn has a number of its own.
    """
    found = []
    types = Counter(path_and_type(path)[1] for path in paths) or {"": 1}
    for number, arrays in enumerate(types.values(), 1):
        if is_in_turn and number > 1:
            break
        of_type = numbered(number, len(types)) if is_named else ""
        operations = arrays if operation in BY_ROWS else 1
        found += [known_ending(of_type + numbered(part, operations)) for part in range(1, operations + 1)]
    return found


def fail_missing(members: Members, name: CallName, wanted: Wanted, error: Exception) -> None:
    """Fail the operations of the other ranks' calls that this rank's call does not have.

    A call may consist of several operations, and their number depends on its arrays. If the ranks' calls differ, the
    first operations of all ranks meet and fail. The ranks with fewer operations then fail the rest, for which the other
    ranks would wait.

    Args:
        members: the ranks.
        name: the name of the first operation of the call.
        wanted: the first operation.
        error: the error of the first operation. Nothing happens unless the ranks disagreed.
    """
    cause, operation = error.__cause__, wanted.collective
    if not isinstance(cause, DisagreementError):
        return
    endings: dict[int, list[str]] = {}
    for rank, signature in cause.signatures.items():
        told = dict(signature)
        endings[rank] = endings_of(
            told.get(OPERATION, ""),
            paths_in(told.get(STRUCTURE)) or (),
            is_in_turn=wanted.call.is_in_turn,
            is_named=wanted.sent_name is not None,
        )
    missing = set().union(*endings.values()).difference(endings.get(members.rank, ()))
    fail_operations(members, name, operation, sorted(missing), error)


def first_mismatch(error: Exception) -> Exception:
    """Return the mismatch of the call's first operation, if `error` reports that another rank had it; else `error`."""
    text = mismatch_before(error)
    return error if text is None else MismatchInternalError(text)
