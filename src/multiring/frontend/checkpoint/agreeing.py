"""Ranks that do a thing with files together: it succeeds on all of them, or fails on all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError, MismatchError
from multiring.frontend.errors import HorovodInternalError
from multiring.frontend.object_collectives import allgather_object

NAME = "checkpoint"


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Have all ranks leave the block together: where it failed with that error, the others with one that says so.

    Args:
        what: is done, for the error.
    """
    failure: Exception | None = None
    try:
        yield
    except HorovodInternalError:  # the others have it, too, or nobody can be told any more
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
    """Return the path of a checkpoint as errors have it, whatever it is."""
    return repr(os.fspath(path) if isinstance(path, os.PathLike) else path)


def target_of(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a checkpoint, absolute; raise ArgumentError where it names nothing."""
    try:
        told: Any = os.fspath(path)
    except TypeError:
        told = path
    if not isinstance(told, str) or not told.strip() or "\0" in told:
        raise ArgumentError(f"{what}: path {told!r}: want the path of a folder, as text")
    return Path(told).absolute()
