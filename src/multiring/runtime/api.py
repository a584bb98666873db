"""The public functions on the world this process is in."""

import os

from multiring.runtime.events import Event
from multiring.runtime.group.group import Group
from multiring.runtime.job.job import current, place
from multiring.runtime.tracing.event_log import EventReader


def rank() -> int:
    """Return this process's rank, 0 to size() - 1."""
    return place().rank


def size() -> int:
    """Return how many ranks the job has."""
    return place().size


def local_rank() -> int:
    """Return this process's rank among those of its host, 0 to local_size() - 1."""
    return place().local_rank


def local_size() -> int:
    """Return how many ranks this host has."""
    return place().local_size


def world() -> Group:
    """Return the group of all ranks."""
    return current().group


def start_timeline(path: str | os.PathLike[str], *, mark_cycles: bool = False) -> None:
    """Record what every rank does from now on; `stop_timeline`, or the end of the job, puts it into the file `path`.

    Every rank calls it. Rank 0's path counts, and its host has the file; while the job runs each rank keeps its part in
    the same directory of its own host.

    Args:
        path: compressed if it ends in .gz. What is there is removed.
        mark_cycles: whether to mark where an operation begins while none is in flight.

    Raises:
        StateError: before `init`; or, on every rank, a timeline is on already.
        ArgumentError: on every rank, and nothing has begun: the path leads nowhere, or a rank cannot write beside it.
    """
    current().timelines.start(path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Stop recording, and return when the file is written. Every rank calls it.

    Raises:
        StateError: before `init`; no timeline is on; or the file could not be written, and every rank's part stays
            where the text says.
    """
    current().timelines.stop()


def take_events() -> list[Event]:
    """Return what this rank's operations and waits took since the last call, oldest first."""
    return current().take_events()


def event_reader() -> EventReader:
    """Return a reader of this rank's events from now on, as the native core has them; `take_events` keeps its own."""
    return current().event_reader()
