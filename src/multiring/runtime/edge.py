"""The public functions on the world this process is in."""

from multiring.runtime.events import Event
from multiring.runtime.group import Group
from multiring.runtime.world import current


def rank() -> int:
    """Return this process's rank, 0 to size() - 1."""
    return current().identity.rank


def size() -> int:
    """Return how many ranks the job has."""
    return current().identity.size


def local_rank() -> int:
    """Return this process's rank among those of its host, 0 to local_size() - 1."""
    return current().local_rank


def local_size() -> int:
    """Return how many ranks this host has."""
    return current().local_size


def world() -> Group:
    """Return the group of all ranks."""
    return current().group


def take_events() -> list[Event]:
    """Return what this rank's operations and waits took since the last call, oldest first."""
    return current().take_events()
