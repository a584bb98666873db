"""Write files at paths that users give.

An existing file is replaced only if multiring wrote it.
"""

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from multiring.errors import ArgumentError


def replace_file(path: Path, data: bytes, *, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Write a file atomically.

    An existing file is replaced if it is empty, or if `is_ours` returns True for it. If `path` is a device or a pipe,
    the data is written to it.

    Args:
        path: the file's path; a link is followed.
        data: the new contents.
        is_ours: returns whether multiring wrote an existing file, given its bytes.
        what: the name of the kind of file in error messages.

    Raises:
        ArgumentError: another file is at `path`; it is left unchanged.
        OSError: the file cannot be written; an existing file is left unchanged.
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
    """Raise ArgumentError if `replace_file` would not replace the file at `path`.

    Raises:
        ArgumentError: `path` is a folder, or a file that multiring did not write.
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
