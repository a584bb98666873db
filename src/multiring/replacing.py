"""Files that users name to be written: one that is there is replaced only where multiring wrote it."""

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from multiring.errors import ArgumentError


def replace_file(path: Path, data: bytes, *, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Write a file, whole or not at all. It may replace an empty file, and one of which `is_ours` is true.

    Devices and pipes are written to.

    Args:
        path: of the file; a link is followed.
        data: what it shall have.
        is_ours: told the bytes of a file that is there, returns whether multiring wrote it.
        what: what errors call the file.

    Raises:
        ArgumentError: something else is at `path`, which is left as it is.
        OSError: the file cannot be written; what was there is there.
    """
    require_replaceable(path, is_ours=is_ours, what=what)
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            device.write(data)
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.new")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            beside.chmod(stat.S_IMODE(path.stat().st_mode))
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def require_replaceable(path: Path, *, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Raise ArgumentError where something is at `path` that `replace_file` would not replace.

    Raises:
        ArgumentError: a folder, or a file that multiring did not write.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        raise ArgumentError(f"{str(path)!r} is a folder, and no place for {what}: want the name of a file")
    if not path.is_file():
        return
    found = path.read_bytes()
    if found and not is_ours(found):
        raise ArgumentError(
            f"{str(path)!r} is there already, and is not {what} that multiring wrote; it was left as it is. Give "
            "another name, or remove the file"
        )
