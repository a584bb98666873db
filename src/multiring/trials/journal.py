"""Journals of Optuna that outlive a full disk and a killed machine.

Both leave a part of a line at the journal's end. Optuna would write its next line behind that part, and could then read
neither. This lock drops the part before each write.
"""

import json
import os
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

_LONG = 1 << 20  # the bytes of a line that can be told to be a journal's
_PART = 1 << 16


def opened_journal(path: str) -> JournalStorage:
    """Return the journal in a file, which is made if there is none.

    Raises:
        ValueError: the file has something else.
        OSError: it cannot be read, or made.
    """
    _require_journal(Path(path))
    return JournalStorage(JournalFileBackend(path, lock_obj=_WholeLines(path)))


class _WholeLines(JournalFileSymlinkLock):
    """Optuna's lock of a journal; whoever holds it finds whole lines only."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = path

    def acquire(self) -> bool:
        """Take the lock, and drop the part of a line that a failed write has left."""
        is_held = super().acquire()
        try:
            _drop_part(self._path)
        except BaseException:
            self.release()
            raise
        return is_held


def _drop_part(path: str) -> None:
    with open(path, "r+b") as file:  # noqa: PTH123 -- by Optuna's path
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _PART)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _require_journal(path: Path) -> None:
    """Refuse a file that has something else: a journal's end may be cut off, and new lines are written to it."""
    if not path.exists() or path.is_dir():
        return
    with path.open("rb") as file:
        first = file.readline(_LONG)
    begin = b'{"op_code":'
    if not first.endswith(b"\n") and first[: len(begin)] == begin[: len(first)]:  # empty, or a part of the first line
        return
    try:
        is_journal = "op_code" in json.loads(first)
    except (ValueError, TypeError):
        is_journal = False
    if not is_journal:
        raise ValueError("the file is no journal of Optuna")
