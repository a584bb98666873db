"""Folders of logs: what a job writes there replaces its own logs alone."""

from pathlib import Path
from typing import BinaryIO

from multiring.errors import LaunchError

LOGS = ".multiring-logs"  # in a folder of logs: their names, by which they are known for ours


def open_log(folder: Path | None, name: str) -> BinaryIO | None:
    """Return a new log, which may replace an older one; None without a folder.

    Raises:
        LaunchError: a file of that name is there, and is no log of multiring's; or it cannot be written.
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
    """Note in a folder of logs that one of this name is written there.

    Raises:
        LaunchError: there is a file of that name already, and no note of it.
        OSError: it cannot be noted.
    """
    path, notes = folder / name, folder / LOGS
    known = notes.read_text("utf-8").splitlines() if notes.exists() else []
    if name in known:
        return
    if path.is_file() and path.stat().st_size:
        raise LaunchError(
            f"{path} is there already, and {LOGS} beside it does not say that it is a log of multiring's; it was left "
            "as it is. Name another folder for the logs, or remove the file"
        )
    with notes.open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
