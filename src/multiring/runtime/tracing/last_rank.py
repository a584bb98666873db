"""The timeline of ranks that end without a shutdown: the last of them makes it of the parts, and nobody waits.

A rank that ends cannot ask the others for their parts: they may wait for this very rank, and its end is what they have
to hear of.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from multiring.errors import ArgumentError
from multiring.trace import merge, part_path, read_part

_log = logging.getLogger("multiring")


def merge_if_last(path: Path, size: int) -> None:
    """Make the timeline `path` of the parts of this host's `size` ranks, unless some may still write theirs."""
    parts = [part_path(path, rank) for rank in range(size)]
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
                fcntl.flock(file, fcntl.LOCK_EX)
                yield part.exists()  # another rank may have merged it meanwhile
            return
    yield False


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
