"""The system's limits on this process's files: their number and their size."""

import resource
from pathlib import Path

from multiring.errors import LaunchError


def make_room_for_files(more: int) -> None:
    """Raise the soft limit of open files so that `more` files can be opened.

    The hard limit is not exceeded. The soft limit is never lowered, and it is raised no further than needed, because
    child processes inherit it and some programs loop over all descriptor numbers below it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = sum(1 for _ in Path("/proc/self/fd").iterdir()) + more
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def refuse_small_limits(segment_bytes: int) -> None:
    """Raise LaunchError if the limits do not allow this process's shared memory.

    The shared memory is a file that is mapped as a whole.
    """
    for limit, flag, what in ((resource.RLIMIT_FSIZE, "-f", "files"), (resource.RLIMIT_AS, "-v", "address space")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < segment_bytes:
            raise LaunchError(
                f"this process's {what} may have at most {soft} bytes (ulimit {flag}), but its shared memory needs "
                f"MULTIRING_SEGMENT_BYTES={segment_bytes}: raise the limit, or set MULTIRING_SEGMENT_BYTES to less"
            )
