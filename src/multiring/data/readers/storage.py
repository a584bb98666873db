"""Storages: read byte ranges of a data set's files by name, through fsspec or, for local files, directly."""

import io
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import require_number, require_path, require_whole
from multiring._forks import ForkSafeLock, begun_in_forks
from multiring._native import read_rows
from multiring.data.permutation import Numbers
from multiring.data.readers.limits import library, require_inside
from multiring.data.readers.retrying import (
    ShortAnswerError,
    asked_again,
    redacted,
    secrets_of,
    without_login,
    without_secrets,
)
from multiring.errors import ArgumentError, DataError, SourceTimeoutError

_OPEN_FILES = 128
_READERS = 16
_MOST_READERS = 4096  # each is a thread
_MOST_TIMEOUT_S = 1e9  # about 32 years; Python's timers take no infinite time
_AT_ONCE = 1 << 30  # the most bytes that one system call reads
_AT_A_TIME = 64  # the most files that one native call reads
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tails:
    """Memory for the bytes that follow rows in their files: the tails.

    The tail of row i is `memory[places[i] : places[i + 1]]`; `places` is int64 (n + 1,).
    """

    memory: Bytes
    places: Numbers

    @classmethod
    def of_sizes(cls, sizes: Numbers) -> "Tails":
        """Return memory for tails of the given sizes in bytes, int64 (n,)."""
        places = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=places[1:])
        return cls(np.empty(int(places[-1]), np.uint8), places)


@runtime_checkable
class Storage(Protocol):
    """A folder of files, or one file, at a URL.

    Attributes:
        url: the URL without its secrets.
    """

    url: str

    def names(self) -> list[str]:
        """Return the names of all files, also in subfolders, sorted."""
        ...

    def size(self, name: str) -> int:
        """Return a file's size in bytes.

        Raises:
            DataError: the file does not exist.
        """
        ...

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on.

        Raises:
            DataError: the file ends before `out` is full.
        """
        ...


def read(storage: Storage, name: str, begin: int = 0, end: int | None = None) -> bytes:
    """Return a file's bytes from `begin` to `end`.

    If `end` comes from a file, the caller must have checked it against a limit.
    """
    size = storage.size(name)
    last = size if end is None else end
    if not 0 <= begin <= last <= size:
        raise DataError(f"{storage.url}: {name} was cut short: it has {size} bytes; bytes {begin} to {last} are needed")
    bytes_between = getattr(storage, "bytes_between", None)
    if bytes_between is not None:  # it neither clears the memory first nor copies the bytes twice
        found: bytes = bytes_between(name, begin, last)
        return found
    data = bytearray(last - begin)
    storage.read_into(name, begin, memoryview(data))
    return bytes(data)


def open_storage(url: str | Path, *, timeout_s: float = 60.0, readers: int = _READERS, **options: Any) -> Storage:
    """Return the storage at `url`, a path or a URL that fsspec can read.

    Args:
        url: the path or URL (s3://, https://, memory://, ...) of a folder or a file.
        timeout_s: seconds after which a request without an answer raises SourceTimeoutError.
        readers: the most concurrent requests of this process.
        options: options of fsspec's file system, for instance credentials.

    Raises:
        ArgumentError: the path or the protocol does not exist, options were passed with a path, `timeout_s` is not a
            number above 0, or `readers` is not a whole number from 1 on.
    """
    url = url if isinstance(url, str) and url and "\0" not in url else str(require_path("url", url))
    require_number("timeout_s", timeout_s, above=True, most=_MOST_TIMEOUT_S)
    require_whole("readers", readers, 1, _MOST_READERS)
    if re.match(r"[A-Za-z][A-Za-z0-9+.\-]*:(//|:)", url) is None or url.startswith("file:"):
        if options:
            raise ArgumentError(
                f"{without_login(url)} is a path, but {', '.join(options)} apply to URLs only: omit them"
            )
        return LocalStorage(url.removeprefix("file:").removeprefix("//"))
    return RemoteStorage(url, timeout_s=timeout_s, readers=readers, options=options)


_SHOWN = 200  # characters that a message shows of an invalid path


class LocalStorage:
    """Files on this machine's mounted file systems."""

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path).absolute()
        try:
            self._root.lstat()
            is_there = self._root.exists()
        except FileNotFoundError:
            is_there = False
        except OSError as error:  # for instance a name that is too long, a loop of links, or a missing permission
            shown = without_login(str(path))[:_SHOWN]
            raise ArgumentError(
                f"no data set at {shown}: {error.strerror}; want the path of a file or folder"
            ) from None
        if not is_there:
            raise ArgumentError(f"no data set at {without_login(str(path))}: there is no such file or folder")
        self.url = str(self._root)
        self._files: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = ForkSafeLock()  # a fork may use the open files: reads with an offset leave their positions alone

    def path(self, name: str) -> Path:
        """Return a file's path."""
        return self._root / require_inside(self.url, name) if name else self._root

    def names(self) -> list[str]:
        """Return the names of all files, sorted, without hidden files and folders."""
        if self._root.is_file():
            return [""]
        found = []
        for folder, folders, files in os.walk(self._root):
            folders[:] = [each for each in folders if not each.startswith(".")]
            within = Path(folder).relative_to(self._root)
            found += [(within / each).as_posix() for each in files if not each.startswith(".")]
        return sorted(found)

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return self._opened(name).size

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` by preadv, which copies only once, from the page cache."""
        opened = self._opened(name)
        done = 0
        while done < len(out):
            got = os.preadv(opened.descriptor, [out[done : done + _AT_ONCE]], begin + done)
            if not got:
                raise DataError(
                    f"{self.path(name)} ends at byte {begin + done}; bytes {begin} to {begin + len(out)} are needed"
                )
            done += got

    def bytes_between(self, name: str, begin: int, end: int) -> bytes:
        """Return a file's bytes from `begin` to `end`.

        Raises:
            DataError: the file ends before `end`.
        """
        size = end - begin
        if type(self).read_into is LocalStorage.read_into and size <= _AT_ONCE:
            opened = self._opened(name)  # this reference keeps the file open
            data = os.pread(opened.descriptor, size, begin)
            if len(data) == size:
                return data
        whole = bytearray(size)
        self.read_into(name, begin, memoryview(whole))
        return bytes(whole)

    def read_rows(self, names: Sequence[str], files: Numbers, begins: Numbers, rows: Bytes, tails: Tails) -> None:
        """Read rows of equal size, and the bytes that follow each row.

        One native call reads many rows. With a call for each row, threads would wait for Python's GIL longer than they
        read.

        Args:
            names: the names of the files.
            files: for each row, the index of its file in `names`, (n,).
            begins: the rows' offsets in their files, int64 (n,).
            rows: memory for all rows.
            tails: memory for the bytes that follow the rows.

        Raises:
            DataError: a file ends before a row or its tail.
        """
        size = len(rows) // len(begins)
        at_once = len(begins) if len(names) <= _AT_A_TIME else _AT_A_TIME
        for first in range(0, len(begins), at_once):
            here = slice(first, first + at_once)
            used, which = np.unique(files[here], return_inverse=True)
            opened = [self._opened(names[each]) for each in used.tolist()]  # this reference keeps the files open
            descriptors = np.array([each.descriptor for each in opened], np.int32)[which]
            places = tails.places[here.start : here.start + len(descriptors) + 1]
            whole = read_rows(
                descriptors,
                begins[here],
                rows[first * size : (first + len(descriptors)) * size],
                np.diff(places),
                tails.memory[places[0] : places[-1]],
            )
            if whole < len(descriptors):  # read the failed row again by pieces, which raises an error with the reason
                row, name = first + whole, names[int(files[first + whole])]
                self.read_into(name, int(begins[row]), rows[row * size : (row + 1) * size].data)
                rest = tails.memory[tails.places[row] : tails.places[row + 1]]
                self.read_into(name, int(begins[row]) + size, rest.data)
                raise DataError(f"{self.path(name)} was changed while it was read, at byte {int(begins[row])}")

    def _opened(self, name: str) -> "_Opened":
        found = self._files.get(name)
        if found is not None:
            return found
        opened = _Opened(self.path(name))
        with self._lock:
            self._files[name] = opened
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return opened

    def close(self) -> None:
        """Close the open files that are not being read.

        A later read opens its file again.
        """
        with self._lock:
            self._files.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_root": self._root, "url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._files = OrderedDict()
        self._lock = ForkSafeLock()


class _Opened:
    """A file's descriptor, which is closed when the last reference to this object is gone."""

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path} cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self.descriptor).st_size

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class RemoteStorage:
    """Files at a URL that fsspec reads."""

    def __init__(self, url: str, *, timeout_s: float, readers: int, options: dict[str, Any]) -> None:
        self._open(url, timeout_s, readers, options)

    def _open(self, url: str, timeout_s: float, readers: int, options: dict[str, Any]) -> None:
        # The caller's URL may contain a password; errors and manifests must not show it.
        self.url = without_secrets(url)
        self._secrets = secrets_of(url, options)
        self._made_of: dict[str, Any] = {"url": url, "timeout_s": timeout_s, "readers": readers, "options": options}
        self._timeout_s = timeout_s
        self._sizes: dict[str, int] = {}
        self._turn = threading.BoundedSemaphore(readers)
        self._inherited: list[Any] = []
        failure = ""
        try:
            self._opened: Any = self._connected()
        except (ImportError, ValueError, TypeError, OSError) as error:
            failure = redacted(str(error), self._secrets) or type(error).__name__
        if failure:
            raise ArgumentError(f"{self.url}: {failure}")
        begun_in_forks(self)

    def _connected(self) -> Any:
        """Return fsspec's file system of the URL, and set the path in it."""
        system, root = library("fsspec").core.url_to_fs(self._made_of["url"], **self._made_of["options"])
        self._root: str = root.rstrip("/")
        return system

    def begin_in_fork(self) -> None:
        """Open the file system again at the next request: its connections and its thread belong to the parent."""
        self._turn = threading.BoundedSemaphore(self._made_of["readers"])
        # The former one stays referenced, because its end could close connections that the parent still uses.
        self._inherited.append(self._opened)
        self._opened = None

    @property
    def _system(self) -> Any:
        if self._opened is None:
            self._opened = self._connected()
        return self._opened

    def _path(self, name: str) -> str:
        return f"{self._root}/{require_inside(self.url, name)}" if name else self._root

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        found: list[str] = self._asked("list of files", lambda: self._system.find(self._root))
        if found == [self._root]:
            return [""]
        within = (each[len(self._root) + 1 :] for each in found if each.startswith(f"{self._root}/"))
        return sorted(each for each in within if not any(part.startswith(".") for part in each.split("/")))

    def size(self, name: str) -> int:
        """Return a file's size in bytes; the source is asked only once."""
        if name not in self._sizes:
            told = self._asked(name, lambda: self._system.info(self._path(name)))
            if told.get("size") is None:
                raise DataError(f"{self.url}: the source does not report the size of {name}; want a source that does")
            self._sizes[name] = int(told["size"])
        return self._sizes[name]

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` by one request."""
        end = begin + len(out)

        def ask() -> bytes:
            data: bytes = self._system.cat_file(self._path(name), start=begin, end=end)
            if len(data) == self._sizes.get(name) and end <= len(data):
                return data[begin:end]  # the server ignores ranges and sends whole files
            if len(data) != len(out):
                raise ShortAnswerError(f"the source sent only {len(data)} bytes for the range {begin} to {end}")
            return data

        out[:] = self._asked(name, ask)

    def _asked(self, what: str, ask: Any) -> Any:
        """Return the source's answer.

        Retry after temporary errors, and raise an error after the time-out. The requests run in another thread, which
        cannot be stopped after a time-out. It ends with the process.
        """
        answer: list[Any] = []
        asked: list[None] = []
        until = time.monotonic() + self._timeout_s

        def counted() -> Any:
            asked.append(None)
            return ask()

        def run() -> None:
            try:
                answer.append((asked_again(counted, until), ""))
            except Exception as error:  # noqa: BLE001 -- raised again by the caller's thread
                told = f"{type(error).__name__}: {redacted(str(error), self._secrets)}"
                answer.append((None, f"{told}, asked {len(asked)} times" if len(asked) > 1 else told))

        if not self._turn.acquire(timeout=self._timeout_s):
            raise SourceTimeoutError(
                f"{self.url}: no request for {what} could begin in {self._timeout_s:g} s; other requests stall"
            )
        try:
            thread = threading.Thread(target=run, daemon=True, name="multiring-source")
            thread.start()
            thread.join(self._timeout_s)
        finally:
            self._turn.release()
        if not answer:
            raise SourceTimeoutError(f"{self.url}: the source has not sent {what} within {self._timeout_s:g} s")
        value, failure = answer[0]
        if failure:
            # The error has no cause: the cause's text and variables contain the URL with its secrets.
            raise DataError(f"{self.url}: {what or 'it'} cannot be read: {failure}")
        return value

    def __getstate__(self) -> dict[str, Any]:
        return self._made_of

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(**state)


class StorageFile(io.RawIOBase):
    """A file of a storage as a Python file object, for libraries that require one."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__()
        self._storage = storage
        self._name = name
        self._size = storage.size(name)
        self._place = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Change the position in the file, and return it."""
        self._place = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence] + offset)
        return self._place

    def tell(self) -> int:
        """Return the position in the file."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the file's remaining bytes, and return the number of bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._place))
        if count:
            self._storage.read_into(self._name, self._place, view[:count])
        self._place += count
        return count


def with_endings(names: Iterable[str], *endings: str) -> list[str]:
    """Return the names with one of the lower-case endings, ignoring the names' case."""
    return [name for name in names if name.lower().endswith(endings)]
