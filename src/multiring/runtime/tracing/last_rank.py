"""The timeline of ranks of one host that leave their job: the last of them makes it of the parts.

A rank that leaves cannot ask the others for their parts: they may wait for this very rank, and what they have to hear
of is that it has left.
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
_LOCK_S = 10.0  # for another rank to look at the parts, or to merge them
_PAUSE_S = 0.01


def merge_if_last(path: Path, size: int, patience_s: float = 0.0) -> None:
    """Make the timeline `path` of the parts of this host's `size` ranks, unless some may still write theirs.

    Args:
        path: of the timeline.
        size: how many ranks the job has.
        patience_s: how long to wait for ranks that still record. After that, one of them makes the timeline.
    """
    parts = [part_path(path, rank) for rank in range(size)]
    deadline = time.monotonic() + patience_s
    while any(map(is_held, parts)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    try:
        if not all(map(_is_over, parts)):  # a rank that records holds its part
            return
        with _alone(parts) as is_first:
            if not is_first or not all(map(_is_over, parts)):
                return
            left = [each for each in parts if each.exists()]
            missing = merge(left, path)
            # The locked one goes last: without it another rank would lock, and merge, what is still there.
            for each in reversed(left):
                each.unlink(missing_ok=True)
    except (ArgumentError, OSError) as error:
        names = " ".join(str(each) for each in parts if each.exists())
        _log.warning("no timeline %s is made of its parts %s: %s", path, names, error)
        return
    for rank, why in missing.items():
        _log.warning("the timeline %s lacks rank %d: %s", path, rank, why)


@contextlib.contextmanager
def _alone(parts: list[Path]) -> Iterator[bool]:
    """Lock the first part that is there against the other ranks; yield whether there is something to merge."""
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            with part.open("rb") as file:
                yield _locks(file) and part.exists()  # another rank may have merged it meanwhile
            return
    yield False


def _locks(file: BinaryIO) -> bool:
    """Lock a file; return False where another process does not unlock it in time: it may be stopped."""
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
    """Return whether nobody writes a part any more: it has its end, or its process has ended."""
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
