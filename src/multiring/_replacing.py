"""Write files at paths that users give.

An existing file is replaced only if multiring wrote it.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from multiring.errors import ArgumentError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def words_of(error: OSError, place: Path | str = "") -> str:
    """Return what failed with a file, in words: the file, the reason, and what to do if there is no room.

    Args:
        error: the error.
        place: the file or folder, if the error does not name it. An error of a write does not.
    """
    name = error.filename or str(place)
    text = f"{name!r}: {error.strerror or error}" if name else f"{error.strerror or error}"
    if error.errno in _FULL:
        text += "; make room on the disk, then give the same command again"
    return text


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
    replace_files({path: data}, is_ours=is_ours, what=what)


def replace_files(files: Mapping[Path, bytes], *, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Write files that belong together, each atomically, as `replace_file` does.

    No file is replaced before the new contents of all are on the disk.

    Args:
        files: the new contents by the files' paths, in the order in which they are replaced.
        is_ours: as of `replace_file`.
        what: as of `replace_file`.

    Raises:
        ArgumentError: as of `replace_file`; all files are left unchanged.
        OSError: a file cannot be written; all are left unchanged, unless the last step failed, a rename.
    """
    for path in files:
        require_replaceable(path, is_ours=is_ours, what=what)
    written: list[tuple[Path, Path]] = []
    try:
        for given, data in files.items():
            if given.exists() and not given.is_file():
                with given.open("wb") as device:
                    device.write(data)
                continue
            path = Path(os.path.realpath(given))
            beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.new")
            written.append((beside, path))
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                beside.chmod(stat.S_IMODE(path.stat().st_mode))
        for beside, path in written:
            beside.replace(path)
    except BaseException:
        for beside, _ in written:
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
