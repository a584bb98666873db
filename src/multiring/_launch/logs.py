"""Open log files in a folder, and replace only files that are logs of multiring."""

from pathlib import Path
from typing import BinaryIO

from multiring.errors import LaunchError

LOGS = ".multiring-logs"  # the file in a log folder that lists the logs that multiring wrote there


def open_log(folder: Path | None, name: str) -> BinaryIO | None:
    """Open a new log file and return it, or None if `folder` is None.

    It may replace an older log.

    Raises:
        LaunchError: a file of that name exists and is not a log of multiring, or the log cannot be written.
    """
    if folder is None:
        return None
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _take(folder, name)
        return path.open("wb", buffering=0)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None


def _take(folder: Path, name: str) -> None:
    """Add `name` to the list of logs in `folder`.

    Raises:
        LaunchError: a non-empty file of that name exists already, and the list does not name it.
        OSError: the list cannot be written.
    """
    path, notes = folder / name, folder / LOGS
    known = notes.read_text("utf-8").splitlines() if notes.exists() else []
    if name in known:
        return
    if path.is_file() and path.stat().st_size:
        raise LaunchError(
            f"{path} is there already, and {LOGS} in the same folder does not list it as a log of multiring; it was "
            "not changed. Name another folder for the logs, or remove the file"
        )
    with notes.open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
