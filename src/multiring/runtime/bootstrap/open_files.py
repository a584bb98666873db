"""How many files this process may have open at a time: connections are files."""

import resource
from pathlib import Path


def make_room_for_files(more: int) -> None:
    """Raise the soft limit of open files so that `more` fit beside what is open now, as far as the hard limit allows.

    Never lowers it, and raises it no further than is needed: what the process starts inherits it, and some programs do
    something for every number below it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = sum(1 for _ in Path("/proc/self/fd").iterdir()) + more
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
