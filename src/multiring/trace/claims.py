"""Protect the files of a timeline: check their content before they are replaced or removed, and lock parts in use.

A rank locks its part while it records. So another job with the same path detects that the file is in use, even if the
first job has only just begun.
"""

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

from multiring._file_locks import try_lock
from multiring.errors import ArgumentError

HEAD = '{"traceEvents":[\n'  # the beginning of a timeline's file
_WRITER = b'"written_by": "multiring '
_TAIL_BYTES = 16 << 20  # the metadata lies within this many bytes at the end of a file
_PIECE_BYTES = 1 << 20
_LINE_BYTES = 1 << 16  # the longest first line of a part
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
_MANY = 100  # how often to try again if the file was removed between open and lock


class TakenError(ArgumentError):
    """Another job records its timeline in the same file now."""


def is_timeline(path: Path) -> bool:
    """Return whether a file is a complete timeline written by multiring.

    An empty file counts as one.
    """
    try:
        with path.open("rb") as plain:
            if not plain.read(1):
                return True
        if path.name.endswith(".gz"):
            with gzip.open(path) as packed:
                return _is_written(packed, None)
        with path.open("rb") as file:
            return _is_written(file, path.stat().st_size)
    except (OSError, EOFError):
        return False


def _is_written(file: Any, size: int | None) -> bool:
    if file.read(len(HEAD)) != HEAD.encode():
        return False
    if size is not None:
        file.seek(max(0, size - _TAIL_BYTES))
        return _WRITER in file.read()
    tail = b""
    while piece := file.read(_PIECE_BYTES):
        tail = (tail + piece)[-_TAIL_BYTES:]
    return _WRITER in tail


def is_unfinished(path: Path) -> bool:
    """Return whether a file is the beginning of a timeline, possibly compressed."""
    try:
        with path.open("rb") as file:
            start = file.read(len(HEAD))
        if start[:2] == b"\x1f\x8b":
            with gzip.open(path) as packed:
                start = packed.read(len(HEAD))
    except EOFError:
        return True
    except OSError:
        return False
    return HEAD.encode().startswith(start)


def is_part(path: Path) -> bool:
    """Return whether a file is a part written by a rank; an empty file counts as one."""
    try:
        with path.open("rb") as file:
            return _begins_a_part(file.read(_LINE_BYTES))
    except OSError:
        return False


def _begins_a_part(data: bytes) -> bool:
    line = data.partition(b"\n")[0]
    try:
        fields = json.loads(line or b"{}")
    except ValueError:
        return False
    return not data or (isinstance(fields, dict) and fields.get("block") == "start" and "timeline" in fields)


def require_file(path: Path) -> None:
    """Raise ArgumentError if `path` exists and is not a regular file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise ArgumentError(f"{str(path)!r} is {what}; a timeline needs a regular file: give the name of a new one")


def require_timeline(path: Path) -> None:
    """Raise ArgumentError if `path` exists and is not a timeline written by multiring."""
    require_file(path)
    if path.exists() and not is_timeline(path):
        raise ArgumentError(
            f"{str(path)!r} is there already, and is no timeline that multiring wrote; it was left as it is. Give "
            "another name, or remove the file"
        )


class Claim:
    """A rank's part, locked: no other job writes or removes the part until this process ends or releases the part.

    Args:
        path: the part; it is created if it does not exist, and emptied.

    Raises:
        TakenError: another process holds the part.
        ArgumentError: `path` is not a part.
        OSError: the part cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        os.ftruncate(self._file, 0)

    def take(self) -> int:
        """Return the descriptor; from now on the caller has to close it."""
        file, self._file = self._file, -1
        return file

    def release(self) -> None:
        """Remove the part and its lock, unless the descriptor was taken."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self.take())


def _locked(path: Path) -> int:
    for _ in range(_MANY):
        require_file(path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            _lock(file, path)
            _require_part(file, path)
            # The owner may have removed the file between open and lock.
            if _is_at(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    raise TakenError(f"other jobs keep creating and removing {str(path)!r}; give the timeline another name")


def _require_part(file: int, path: Path) -> None:
    if not _begins_a_part(os.pread(file, _LINE_BYTES, 0)):
        raise ArgumentError(
            f"{str(path)!r} is there already, and is no part of a timeline; it was left as it is. Give the timeline "
            "another name, or remove the file"
        )


def _lock(file: int, path: Path) -> None:
    if not try_lock(file):
        raise TakenError(f"another job is writing its timeline to {str(path)!r}; give this timeline another name")


def _is_at(file: int, path: Path) -> bool:
    try:
        here, there = os.fstat(file), path.stat()
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def is_held(path: Path) -> bool:
    """Return whether a process holds the part at `path`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        _lock(file, path)
    except TakenError:
        return True
    finally:
        os.close(file)
    return False
