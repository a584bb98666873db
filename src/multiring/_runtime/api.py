"""Public functions about this process's job: ranks, groups, timelines, events."""

import os

from multiring._runtime.events import Event
from multiring._runtime.group.group import Group
from multiring._runtime.job.job import current, place
from multiring._runtime.tracing.event_log import EventReader


def rank() -> int:
    """Return this process's rank, 0 to size() - 1."""
    return place().rank


def size() -> int:
    """Return the number of ranks in the job."""
    return place().size


def local_rank() -> int:
    """Return this process's rank among the ranks of its host, 0 to local_size() - 1."""
    return place().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return place().local_size


def world() -> Group:
    """Return the group of all ranks."""
    return current().group


def start_timeline(path: str | os.PathLike[str], *, mark_cycles: bool = False) -> None:
    """Start recording a timeline of every rank's operations.

    Every rank must call this function. Rank 0's `path` is used; the other ranks' paths are ignored. `stop_timeline`, or
    the end of the job, writes the file on rank 0's host. While the job runs, each rank keeps its part of the recording
    in the same directory on its own host.

    Args:
        path: the timeline file, compressed if its name ends in .gz. An existing file is removed.
        mark_cycles: whether to mark each operation that starts while no other operation is in flight.

    Raises:
        StateError: `init` was not called. On every rank: a timeline is already being recorded.
        ArgumentError: on every rank: `path` is unusable (for example, its directory does not exist), or a rank cannot
            write its part. The recording has not started.
    """
    current().timelines.start(path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Stop recording and return once the timeline file is written.

    Every rank must call this function.

    Raises:
        StateError: `init` was not called; no timeline is being recorded; or the file could not be written. In the last
            case every rank's part stays on disk, and the message gives its path.
    """
    current().timelines.stop()


def drain_events() -> list[Event]:
    """Return the events this rank recorded since the last call, oldest first."""
    return current().drain_events()


def event_reader() -> EventReader:
    """Return a reader of this rank's future events, as rows of the native core.

    `drain_events` is not affected.
    """
    return current().event_reader()
