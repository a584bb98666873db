"""File operations of all ranks, which succeed on all ranks or fail on all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multiring._frontend.errors import OperationError
from multiring._frontend.object_collectives import allgather_object
from multiring.errors import ArgumentError, MismatchError

NAME = "checkpoint"


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Wait for all ranks at the end of the block, and raise if it failed on any rank.

    The failed rank raises its own error, and the other ranks raise a MismatchError that quotes it.

    Args:
        what: the operation, for the error.
    """
    failure: Exception | None = None
    try:
        yield
    except OperationError:  # the other ranks raise it as well, or cannot be reached any more
        raise
    except Exception as error:  # noqa: BLE001 -- it is raised below
        failure = error
    told: list[str] = allgather_object(f"{type(failure).__name__}: {failure}" if failure else "", name=NAME)
    if failure is not None:
        raise failure
    failed = next((f"rank {number} failed with {text}" for number, text in enumerate(told) if text), None)
    if failed:
        raise MismatchError(f"{what}: {failed}")


def shown_path(path: Any) -> str:
    """Return the path of a checkpoint as text for errors; `path` may be invalid."""
    return repr(os.fspath(path) if isinstance(path, os.PathLike) else path)


def target_of(path: str | os.PathLike[str], what: str) -> Path:
    """Return the absolute path of a checkpoint; raise ArgumentError if `path` is not a usable path."""
    try:
        told: Any = os.fspath(path)
    except TypeError:
        told = path
    if not isinstance(told, str) or not told.strip() or "\0" in told:
        raise ArgumentError(f"{what}: path {told!r}: want the path of a folder, as text")
    return Path(told).absolute()
