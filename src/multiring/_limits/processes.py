"""Errors for processes and threads that the kernel refuses to start, with the limits that hold here.

Source: fork(2), pthread_create(3), and the kernel's Documentation/admin-guide/cgroup-v2.rst (pids.max).
"""

import errno
import resource
import threading
from pathlib import Path

from multiring._limits.control_groups import group_folders, groups_told, text_of
from multiring.errors import LaunchError

# What Python says of a thread that the kernel refuses.
_NO_THREAD = "can't start new thread"


def is_limit(error: BaseException) -> bool:
    """Return whether `error` says that a limit of processes and threads is used up."""
    return (isinstance(error, OSError) and error.errno == errno.EAGAIN) or _NO_THREAD in str(error)


def refused(what: str, error: BaseException) -> LaunchError:
    """Return the error for a process or thread that could not be started.

    Args:
        what: what could not be started, as in "ssh cannot be started".
        error: the system's error.
    """
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return LaunchError(f"{what} ({reason}){limits_told() if is_limit(error) else ''}")


def limits_told(groups: str | None = None, mounts: Path = Path("/sys/fs/cgroup")) -> str:
    """Return the end of an error's text: which limits of processes and threads hold here, and what to do.

    Args:
        groups: the content of /proc/self/cgroup; None reads it.
        mounts: the folder in which control groups are mounted.
    """
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    known = [] if most == resource.RLIM_INFINITY else [f"`ulimit -u` is {most}"]
    for folder in group_folders(groups_told() if groups is None else groups, "pids", ["pids.max"], mounts):
        limit, used = (text_of(folder / name).strip() for name in ("pids.max", "pids.current"))
        if limit.isdecimal():
            known.append(f"pids.max of {folder} is {limit}, of which {used or 'an unknown number'} are used")
    found = f": {'; '.join(known)}" if known else ""
    return (
        f": this user or container may have no more processes and threads{found}. Raise the limit (`ulimit -u`, "
        "pids.max of the control group or `podman run --pids-limit`), or use fewer ranks, or fewer threads for each "
        "(OMP_NUM_THREADS)"
    )


def start_thread(thread: threading.Thread, what: str) -> None:
    """Start a thread.

    Args:
        thread: the thread.
        what: what cannot be started if the kernel refuses, as in "rank 0 cannot start a thread".

    Raises:
        LaunchError: the kernel refuses. The text names the limits.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        raise refused(what, error) from None
