"""Timelines with Horovod's function names."""

import os

from multiring._frontend.process_sets import world_now
from multiring._runtime import start_timeline as start_on_all
from multiring._runtime import stop_timeline as stop_on_all
from multiring.errors import StateError
from multiring.trace import recorded


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 -- Horovod's signature
    """Start to record the operations of all ranks into one file.

    Every rank calls it. See `multiring.start_timeline`.

    Raises:
        ValueError: on every rank: the call came before `init`, a timeline is already being recorded, or the file cannot
            be written.
    """
    world_now()
    try:
        start_on_all(file_path, mark_cycles=mark_cycles)
    except StateError as error:
        raise ValueError(str(error)) from error


def stop_timeline() -> None:
    """Stop recording, and wait until the file is written.

    The call has no effect if no timeline is being recorded. Every rank calls it.

    Raises:
        ValueError: the call came before `init`, or the file could not be written.
    """
    world_now()
    if recorded() is None:
        return
    try:
        stop_on_all()
    except StateError as error:
        raise ValueError(str(error)) from error
