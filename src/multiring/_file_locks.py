"""Locks on files, which the kernel releases when the process that holds one ends, in any way."""

import errno
import fcntl
import time
from typing import Protocol

_TAKEN = {errno.EACCES, errno.EAGAIN}
_LOOK_S = 0.05


class HasDescriptor(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


def try_lock(file: int | HasDescriptor) -> bool:
    """Lock an open file or folder until it is closed; return False if another opener has locked it.

    On a file system without locks nothing is locked, and the result is True: another opener cannot be noticed there.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _TAKEN
    return True


def lock_within(file: int | HasDescriptor, seconds: float) -> bool:
    """Lock an open file or folder as `try_lock` does, and wait for other openers for up to `seconds`."""
    deadline = time.monotonic() + seconds
    while not try_lock(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
