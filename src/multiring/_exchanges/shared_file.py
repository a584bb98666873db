"""A file that only this user can read, in folders that all hosts of the step may see.

The file is named by the step. Rank 0 removes it once all ranks have met, or have failed to. A killed rank 0 leaves it;
its secret is that of no other job, and the next run of a requeued job removes it.
"""

import json
import os
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from multiring._exchanges.contract import ExchangeError, PlaceExchange

_BEGINNING = ".multiring-"
_MOST_BYTES = 1 << 20
_OTHERS = 0o077  # the rights of the group and of others


class SharedFileExchange(PlaceExchange):
    """Rank 0 writes the text into each folder that it can write to; the others look into each.

    Args:
        step: the step's name.
        folders: the folders.
    """

    name = "file"
    is_last_resort = True
    may_be_stale = True  # a killed rank 0 leaves its file

    def __init__(self, step: str, folders: Sequence[Path]) -> None:
        super().__init__()
        self._step = step
        self._paths = [folder / f"{_BEGINNING}{step}" for folder in folders]
        self._written: list[Path] = []

    def publish(self, text: str) -> bool:
        """Write the file."""
        data = json.dumps({"step": self._step, "text": text}).encode()
        refusals = []
        for path in self._paths:
            try:
                self._remove_leftovers(path)
                _write(path, data)
            except (OSError, ExchangeError) as error:
                refusals.append(f"{path.parent}: {getattr(error, 'strerror', None) or error}")
            else:
                self._written.append(path)
        if not self._written:
            raise ExchangeError(f"no folder can be written to: {', '.join(refusals) or 'none is known'}")
        return False

    def fetch(self, wait_s: float) -> str | None:
        """Read the file."""
        if not self._paths:
            raise ExchangeError("no folder is known that all hosts may see")
        found = {}
        for path in self._paths:
            try:
                told = json.loads(_read(path))
                if told["step"] == self._step:
                    return str(told["text"])
                found[path] = "of another step"
            except OSError as error:
                found[path] = error.strerror or str(error)
            except (ExchangeError, ValueError, KeyError, TypeError) as error:
                found[path] = str(error)
        self.waits_for = ", ".join(f"{path}: {text}" for path, text in found.items())
        time.sleep(wait_s)
        return None

    def close(self) -> None:
        """Remove what this process has written."""
        while self._written:
            with suppress(OSError):
                self._written.pop().unlink()

    def _remove_leftovers(self, path: Path) -> None:
        """Remove this user's files of former runs of the same step."""
        job, step, run = self._step.split(".")
        restarts, _, hosts = run.partition("-")
        for other in path.parent.glob(f"{_BEGINNING}{job}.{step}.*"):
            restarts_there, _, hosts_there = other.name.removeprefix(f"{_BEGINNING}{job}.{step}.").partition("-")
            # Another step of a heterogeneous job can have the same numbers, and may be waiting for its file.
            is_of_other_step = restarts_there == restarts and hosts_there.partition(".")[0] != hosts
            with suppress(FileNotFoundError):
                if not is_of_other_step and _is_ours(other.lstat()):
                    other.unlink()


def _is_ours(status: os.stat_result) -> bool:
    is_alone = status.st_uid == os.getuid() and status.st_mode & _OTHERS == 0
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_alone


def _write(path: Path, data: bytes) -> None:
    """Make a file that no other user can read and that appears with all of its text.

    Raises:
        OSError: there is a file already, or the folder cannot be written to.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(beside, path)  # fails if there is one, in contrast to rename
    finally:
        beside.unlink()


def _read(path: Path) -> bytes:
    """Return what this user's file contains.

    Raises:
        OSError: it is not there, or is a link.
        ExchangeError: another user can have written or read it.
    """
    # A file system of the network looks for new files in a folder when the folder is opened.
    os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not _is_ours(status):
            raise ExchangeError(
                f"not a file of user {os.getuid()} alone: user {status.st_uid}, {stat.filemode(status.st_mode)}"
            )
        return file.read(_MOST_BYTES)
