"""Merge a timeline when the ranks of a job leave one after the other.

All ranks are on one host; the last one merges the parts. A rank that leaves cannot ask the other ranks for their parts.
They may be waiting for this very rank, and must first detect that it has left.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from multiring.errors import ArgumentError
from multiring.trace import is_held, merge, part_path, read_part

_log = logging.getLogger("multiring")
_LOCK_S = 10.0  # how long another rank may take to read or merge the parts
_PAUSE_S = 0.01


def merge_if_last(path: Path, size: int, patience_s: float = 0.0) -> None:
    """Merge the parts of this host's `size` ranks into the timeline `path`.

    Nothing is done if a rank may still write its part.

    Args:
        path: the timeline file.
        size: the number of ranks in the job.
        patience_s: the seconds to wait for ranks that still record. After that, one of the recording ranks merges the
            parts.
    """
    parts = [part_path(path, rank) for rank in range(size)]
    deadline = time.monotonic() + patience_s
    while any(map(is_held, parts)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    try:
        if not all(map(_is_over, parts)):  # a rank that still records has locked its part
            return
        with _alone(parts) as is_first:
            if not is_first or not all(map(_is_over, parts)):
                return
            left = [each for each in parts if each.exists()]
            missing = merge(left, path)
            # Remove the locked part last. Otherwise another rank would lock and merge the remaining parts.
            for each in reversed(left):
                each.unlink(missing_ok=True)
    except (ArgumentError, OSError) as error:
        names = " ".join(str(each) for each in parts if each.exists())
        _log.warning("the timeline %s cannot be made from its parts %s: %s", path, names, error)
        return
    for rank, why in missing.items():
        _log.warning("the timeline %s lacks rank %d: %s", path, rank, why)


@contextlib.contextmanager
def _alone(parts: list[Path]) -> Iterator[bool]:
    """Lock the first existing part; yield whether there are parts to merge.

    The lock keeps other ranks from merging.
    """
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            with part.open("rb") as file:
                yield _locks(file) and part.exists()  # another rank may have merged the part before the lock
            return
    yield False


def _locks(file: BinaryIO) -> bool:
    """Lock a file; return False if another process holds the lock for too long.

    That process may be stopped.
    """
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _is_over(part: Path) -> bool:
    """Return whether the part is complete, or its process has ended."""
    try:
        told = read_part(part.read_bytes())
    except FileNotFoundError:
        return True
    except ArgumentError:
        return False
    return told.end is not None or not _lives(int(told.who["pid"]))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
