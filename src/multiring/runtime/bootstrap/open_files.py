"""What the system's limits say of this process's files: how many there may be, and how large."""

import resource
from pathlib import Path

from multiring.errors import LaunchError


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


def refuse_small_limits(segment_bytes: int) -> None:
    """Raise LaunchError where this process may not have its shared memory: a file, which it maps whole."""
    for limit, flag, what in ((resource.RLIMIT_FSIZE, "-f", "files"), (resource.RLIMIT_AS, "-v", "address space")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < segment_bytes:
            raise LaunchError(
                f"this process's {what} may have {soft} bytes (ulimit {flag}), and its shared memory wants "
                f"MULTIRING_SEGMENT_BYTES={segment_bytes}: raise the limit, or set MULTIRING_SEGMENT_BYTES to less"
            )
