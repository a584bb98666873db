"""Requests in which this rank cannot take part. They fail on all ranks.

Otherwise the other ranks would wait, and take this rank's next operation of the same name for the one that failed.
"""

from collections.abc import Callable
from contextlib import suppress

from multiring._frontend.handles import submit_failure
from multiring._frontend.process_sets import Members
from multiring._frontend.requests.wanted import COLLECTIVES, Wanted
from multiring._frontend.signatures import ALLREDUCE, GROUPED_ALLREDUCE
from multiring._native import Request
from multiring.errors import ArgumentError, MultiringError

Finish = Callable[[Request], None]
"""Waits for an operation, and stores its results."""


class FailedOperation:
    """An operation in which this rank cannot take part. It fails on the other ranks, too."""

    def __init__(self, members: Members, wanted: Wanted) -> None:
        operation = COLLECTIVES[wanted.root]
        is_grouped = operation == ALLREDUCE and len(wanted.shapes) > 1
        self._operation = GROUPED_ALLREDUCE if is_grouped else operation
        self._members, self._name = members, wanted.name
        self._error = ArgumentError(wanted.wire or "")

    def submit(self, request: Request) -> Finish:  # noqa: ARG002 -- part of the interface
        return declined(self._members, self._name, self._operation, self._error)


def declined(members: Members, name: str | None, operation: str, error: Exception) -> Finish:
    """Make an operation fail on all ranks, because of `error` on this one; return a function that raises `error`."""
    full_name = f"noname.{members.next_number()}" if name is None else f"{operation}.{name}"
    pending = submit_failure(members, full_name, f"{operation} that failed: {error}")

    def finish(_: Request) -> None:
        with suppress(MultiringError):
            pending.wait()
        raise error

    return finish
