"""A checkpoint's folder: its saves, the current save, and the files that may be removed.

    manifest.json                    names the current save and the number of its ranks; replaced by renaming
    data-0123456789abcdef/           a save; its files do not change after the manifest names it
        save.json                    names the process that makes the save, which locks this file until the save ends
        shared.json, .safetensors    the values that are the same on all ranks; rank 0 writes them
        rank-00000.json, ...         each rank's own values

Each save writes to its own folder, and then the manifest is replaced to name that folder. Every reader and writer
therefore finds the old save or the new save, even after kills and power cuts. A file is replaced or removed only if its
content shows that multiring wrote it, and never if it belongs to the save that the manifest names.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import IO, Any

from multiring._runtime.bootstrap.addresses import boot_id
from multiring.errors import ArgumentError

FORMAT = 2
BEFORE = 1  # the format of multiring 0.2: all files are in the folder itself, which was replaced as a whole
MANIFEST, MARK = "manifest.json", "save.json"
SAVER = "multiring checkpoint"
# Locks of another host may not be visible here. A save of another host counts as abandoned if its files stay unchanged
# for this long.
LOST_AFTER_S = 3600.0
_DATA = re.compile(r"data-([0-9a-f]{16})")
_NEW = re.compile(r"manifest-([0-9a-f]{16})\.new")
_PARTS = re.compile(r"(shared|rank-\d{5,})\.(json|safetensors)")
_UNSYNCED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # errors of file systems that cannot sync folders
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


def data_folder(path: Path, token: str) -> Path:
    """Return the folder of the files of a save to `path`."""
    return path / f"data-{token}"


def manifest_in(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint of this version or of 0.2.

    Raises:
        FileNotFoundError: there is no manifest.
        ArgumentError: the manifest cannot be read, is of a newer version, or was not written by multiring.
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
        raise ArgumentError(f"checkpoint {folder}: {MANIFEST} does not belong to a checkpoint: it lacks {SAVER!r}")
    return manifest


def token_in(folder: Path) -> str | None:
    """Return the token of the current save, or None if there is no current save."""
    try:
        token: str = manifest_in(folder)["token"]
    except (FileNotFoundError, ArgumentError):
        return None
    return token


def require_ours(path: Path) -> None:
    """Raise ArgumentError unless a checkpoint may be saved to `path`.

    The path must be free, an empty folder, or a folder with a checkpoint of multiring.
    """
    wanted = "want another path, an empty folder, or a checkpoint of multiring"
    if not path.exists():
        if path.is_symlink():
            raise ArgumentError(f"save: {path} is a link to {path.readlink()}, which does not exist: {wanted}")
        return
    if not path.is_dir():
        raise ArgumentError(f"{path} is a file, and the folder of a checkpoint would replace it: {wanted}")
    names = sorted(each.name for each in path.iterdir())
    if MANIFEST in names:
        try:
            manifest_in(path)
        except ArgumentError as error:
            raise ArgumentError(
                f"save: nothing was saved, because the save would replace other files: {error}; {wanted}"
            ) from error
        return
    strangers = [each for each in names if not _DATA.fullmatch(each) and not _NEW.fullmatch(each)]
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise ArgumentError(
            f"save: {path} is a folder with {', '.join(map(repr, strangers[:3]))}{more}, and not a checkpoint of "
            f"multiring: {wanted}"
        )


class SaveAttempt:
    """A save whose folder this process makes.

    If the block fails before `publish`, the folder is removed.
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token = path, token
        self._mark: IO[str] | None = None
        self._made_path = False

    def __enter__(self) -> "SaveAttempt":  # noqa: PYI034 -- no class derives from it, and Python 3.10 has no Self
        return self

    @property
    def has_begun(self) -> bool:
        """Return whether this process has made the folder."""
        return self._mark is not None

    def begin(self) -> None:
        """Make the folder, with a file that identifies it as multiring's.

        Raises:
            OSError: the folder cannot be made.
        """
        made = [each for each in (self._path, *self._path.parents) if not each.exists()]
        self._made_path = self._path in made
        folder = data_folder(self._path, self._token)
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileNotFoundError:  # another job's save failed and removed the empty parent folder
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

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._mark is None:
            return
        if error is not None and not self._may_count():
            _remove(self._path, self._token)
            if self._made_path:
                with contextlib.suppress(OSError):
                    self._path.rmdir()  # fails if the folder is not empty
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
    """Make the manifest name a save, and remove the save that it replaces.

    All files of the save must be on the disk.

    Args:
        path: the path of the checkpoint.
        manifest: the new manifest, with the save's token.
        write: a function that writes a file and waits until it is on the disk.

    Raises:
        OSError: the operation failed. The manifest names either the previous save or this one.
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
        raise FileNotFoundError(f"save to {path}: {folder} was removed by another process while it was written")
    try:
        new.replace(path / MANIFEST)
    except FileNotFoundError:  # NFS may send a rename twice, and report that the second one failed
        if token_in(path) != token:
            raise
    sync(path)
    _clean(path, before)


def _clean(path: Path, before: dict[str, Any] | None) -> None:
    """Remove the previous save, and unfinished saves that no process is writing."""
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
    """Return whether a save is not the current one, and no process is writing it."""
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
            # A free lock means that the save has ended: its publication has happened, or never will. So read the
            # manifest after the lock.
            return (is_over or age_s > LOST_AFTER_S) and token_in(path) not in {token, None}
    except (OSError, ValueError, AttributeError):
        return False


def _remove(path: Path, token: str) -> None:
    """Remove the files of a save that is not current. The mark file, which identifies the save, is removed last."""
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
    """Return the folders where multiring 0.2 may have left a checkpoint of `path`.

    The last two folders exist only if a save was killed between two renames.
    """
    return [path, path.with_name(f".{path.name}.old"), path.with_name(f".{path.name}.new")]


def _is_all_of_before(folder: Path) -> bool:
    """Return whether a folder contains only a checkpoint of multiring 0.2."""
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
    """Try to lock a file until it is closed; return the owner of the lock: "ours", "another's" or "unknown"."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "unknown" if error.errno in _NO_LOCKS else "another's"
    return "ours"


def sync(folder: Path) -> None:
    """Wait until the directory entries of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise
    finally:
        os.close(descriptor)
