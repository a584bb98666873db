"""A checkpoint's folder: which saves it has, which of them counts, and what may be removed.

    manifest.json                    which save counts, and how many ranks made it; replaced by renaming
    data-0123456789abcdef/           a save, whose files nobody changes once the manifest names it
        save.json                    who makes it; locked by that process until the save has ended
        shared.json, .safetensors    what is the same on all ranks, by rank 0
        rank-00000.json, ...         what is each rank's own

Each save writes to a folder of its own and then has the manifest name it. So a reader, another writer, or whoever
comes after any number of kills and power cuts finds the one that was there or the new one. Only what is known as
multiring's by its content is ever replaced or removed, and nothing that the manifest names.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from multiring.errors import ArgumentError
from multiring.runtime.bootstrap.addresses import boot_id

FORMAT = 2
BEFORE = 1  # the format of multiring 0.2: all files lie in the folder itself, which was replaced as a whole
MANIFEST, MARK = "manifest.json", "save.json"
SAVER = "multiring checkpoint"
# A save of another host, whose lock says nothing here, is given up for lost when nothing of it changed for this long.
LOST_AFTER_S = 3600.0
_DATA = re.compile(r"data-([0-9a-f]{16})")
_NEW = re.compile(r"manifest-([0-9a-f]{16})\.new")
_PARTS = re.compile(r"(shared|rank-\d{5,})\.(json|safetensors)")
_UNSYNCED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # of file systems that sync no folders
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


def data_folder(path: Path, token: str) -> Path:
    """Return where the files of a save to `path` lie."""
    return path / f"data-{token}"


def manifest_in(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint of this version or of 0.2.

    Raises:
        FileNotFoundError: there is none.
        ArgumentError: it cannot be read, is of a newer version, or is none of multiring's.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(str(folder)) from error
    except (ValueError, OSError, RecursionError) as error:
        raise ArgumentError(f"checkpoint {folder}: {MANIFEST} cannot be read: {error}") from error
    known = (BEFORE, FORMAT)
    if not isinstance(manifest, dict) or manifest.get("format") not in known or manifest["format"] is True:
        raise ArgumentError(
            f"checkpoint {folder} is not of format {' or '.join(map(str, known))}; was it saved by a newer version?"
        )
    token, ranks = manifest.get("token"), manifest.get("ranks")
    if not isinstance(token, str) or not re.fullmatch(r"[0-9a-f]{16}", token) or type(ranks) is not int or ranks < 1:
        raise ArgumentError(f"checkpoint {folder}: {MANIFEST} is damaged: it lacks a token, or the number of ranks")
    if manifest["format"] == FORMAT and manifest.get("saver") != SAVER:
        raise ArgumentError(f"checkpoint {folder}: {MANIFEST} is no checkpoint's: it lacks {SAVER!r}")
    return manifest


def token_in(folder: Path) -> str | None:
    """Return the token of the save that counts, or None where there is none."""
    try:
        token: str = manifest_in(folder)["token"]
    except (FileNotFoundError, ArgumentError):
        return None
    return token


def require_ours(path: Path) -> None:
    """Raise ArgumentError unless `path` is free, an empty folder, or a folder with multiring's checkpoint."""
    wanted = "want another path, an empty folder, or a checkpoint of multiring's"
    if not path.exists():
        if path.is_symlink():
            raise ArgumentError(f"save: {path} is a link to {path.readlink()}, which is not there: {wanted}")
        return
    if not path.is_dir():
        raise ArgumentError(f"{path} is a file, which a checkpoint, a folder, would replace: {wanted}")
    names = sorted(each.name for each in path.iterdir())
    if MANIFEST in names:
        try:
            manifest_in(path)
        except ArgumentError as error:
            raise ArgumentError(
                f"save: nothing was saved, as what is there would be replaced: {error}; {wanted}"
            ) from error
        return
    strangers = [each for each in names if not _DATA.fullmatch(each) and not _NEW.fullmatch(each)]
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise ArgumentError(
            f"save: {path} is a folder with {', '.join(map(repr, strangers[:3]))}{more}, and no checkpoint of "
            f"multiring's: {wanted}"
        )


class Attempt:
    """A save that this process makes the folder for; leaving the block without `publish` removes it."""

    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token = path, token
        self._mark: IO[str] | None = None
        self._made_path = False

    def __enter__(self) -> "Attempt":  # noqa: PYI034 -- nobody derives from it, and Python 3.10 has no Self
        return self

    @property
    def has_begun(self) -> bool:
        """Return whether this process has made the folder."""
        return self._mark is not None

    def begin(self) -> None:
        """Make the folder, so that every process knows it for one of multiring's.

        Raises:
            OSError: it cannot be made.
        """
        made = [each for each in (self._path, *self._path.parents) if not each.exists()]
        self._made_path = self._path in made
        folder = data_folder(self._path, self._token)
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileNotFoundError:  # another job's save failed, and took the empty folder with it
            self._path.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        self._mark = (folder / MARK).open("x", encoding="utf-8")
        _lock(self._mark)
        told = {"saver": SAVER, "format": FORMAT, "token": self._token, "host": boot_id(), "pid": os.getpid()}
        self._mark.write(json.dumps(told))
        self._mark.flush()
        os.fsync(self._mark.fileno())
        for each in (folder, self._path, *(each.parent for each in made)):
            sync(each)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mark is None:
            return
        if error is not None and not self._may_count():
            _remove(self._path, self._token)
            if self._made_path:
                with contextlib.suppress(OSError):
                    self._path.rmdir()  # which takes none that has anything in it
        self._mark.close()

    def _may_count(self) -> bool:
        """Return whether the manifest names this save, or cannot be read."""
        try:
            return bool(manifest_in(self._path)["token"] == self._token)
        except FileNotFoundError:
            return False
        except ArgumentError:
            return True


def publish(path: Path, manifest: dict[str, Any], write: Any) -> None:
    """Have the manifest name a save, all of whose files are on the disk; then remove what it replaces.

    Args:
        path: of the checkpoint.
        manifest: with its token.
        write: writes a file, and has it on the disk.

    Raises:
        OSError: that was not possible; the save that counted still does, or this one.
    """
    token = manifest["token"]
    folder = data_folder(path, token)
    sync(folder)
    new = path / f"manifest-{token}.new"
    write(new, [[json.dumps(manifest, indent=1).encode()]])
    before = None
    with contextlib.suppress(FileNotFoundError, ArgumentError):
        before = manifest_in(path)
    if not (folder / MARK).exists():
        new.unlink(missing_ok=True)
        raise FileNotFoundError(f"save to {path}: {folder} was removed by somebody else while it was written")
    try:
        new.replace(path / MANIFEST)
    except FileNotFoundError:  # over NFS a renaming that is sent twice is told to have failed
        if token_in(path) != token:
            raise
    sync(path)
    _clean(path, before)


def _clean(path: Path, before: dict[str, Any] | None) -> None:
    """Remove what no longer counts: the save before, and those that were not finished."""
    if before is not None and before["format"] == FORMAT and before["token"] != token_in(path):
        _remove(path, before["token"])
    if before is not None and before["format"] == BEFORE:
        _remove_parts(path)
    for name in _listed(path):
        data, new = _DATA.fullmatch(name), _NEW.fullmatch(name)
        if data and _is_lost(path, data[1]):
            _remove(path, data[1])
        elif new and not data_folder(path, new[1]).exists():
            with contextlib.suppress(OSError):
                (path / name).unlink()
    for each in places_of_before(path)[1:]:
        if _is_all_of_before(each):
            _remove_parts(each)
            with contextlib.suppress(OSError):
                (each / MANIFEST).unlink(missing_ok=True)
                each.rmdir()


def _is_lost(path: Path, token: str) -> bool:
    """Return whether a save does not count, and nobody makes it any more."""
    folder = data_folder(path, token)
    try:
        with (folder / MARK).open("r+", encoding="utf-8") as mark:
            lock = _lock(mark)
            told = json.load(mark)
            if lock == "another's" or told.get("saver") != SAVER or told.get("token") != token:
                return False
            latest = max(each.stat().st_mtime for each in folder.iterdir())
            age_s = (path / MANIFEST).stat().st_mtime - latest
            is_over = lock == "ours" and told.get("host") == boot_id()
            # Whose lock is free has been published, or never will be: so the manifest is looked at last.
            return (is_over or age_s > LOST_AFTER_S) and token_in(path) not in {token, None}
    except (OSError, ValueError, AttributeError):
        return False


def _remove(path: Path, token: str) -> None:
    """Remove the files of a save that does not count; the mark, by which they are known, last."""
    folder = data_folder(path, token)
    _remove_parts(folder)
    with contextlib.suppress(OSError):
        (path / f"manifest-{token}.new").unlink(missing_ok=True)
        if _listed(folder) == [MARK]:
            (folder / MARK).unlink()
        folder.rmdir()


def _remove_parts(folder: Path) -> None:
    for name in _listed(folder):
        if _PARTS.fullmatch(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def places_of_before(path: Path) -> list[Path]:
    """Return where multiring 0.2 may have left a checkpoint of `path`: the last two after a kill between renamings."""
    return [path, path.with_name(f".{path.name}.old"), path.with_name(f".{path.name}.new")]


def _is_all_of_before(folder: Path) -> bool:
    """Return whether a folder has nothing but a checkpoint of multiring 0.2."""
    if folder.is_symlink() or any(each != MANIFEST and not _PARTS.fullmatch(each) for each in _listed(folder)):
        return False
    try:
        return bool(manifest_in(folder)["format"] == BEFORE)
    except (FileNotFoundError, ArgumentError):
        return False


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(each.name for each in folder.iterdir())
    except OSError:
        return []


def _lock(file: IO[str]) -> str:
    """Lock a file for as long as it is open; return whose lock it is, "ours" or "another's", or "unknown"."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "unknown" if error.errno in _NO_LOCKS else "another's"
    return "ours"


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise
    finally:
        os.close(descriptor)
