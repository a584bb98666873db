"""fsspec's protocol `multiring`: multiring::s3://bucket/file reads verified blocks through this host's cache.

fsspec finds the protocol by its entry point. A program that opens URLs by fsspec only has to change the URL.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from multiring.data.caching.blocks import QUOTA_BYTES, BlockCache
from multiring.data.caching.mapped import cache_folder
from multiring.data.readers.manifest import BLOCK_BYTES
from multiring.data.readers.opening import tell
from multiring.data.readers.retrying import asked_again, redacted, secrets_of, without_secrets
from multiring.errors import ArgumentError

_ALONE = re.compile("^multiring:[:/]*")
_TIMEOUT_S = 60.0
_TRIES = 3  # reads of a file that changes during each read
# Attributes that change whenever a file's content does, by their names in fsspec's file systems, in lower case.
_VERSIONS = frozenset(
    (
        "etag",
        "content-md5",
        "digest",
        "contenthash",
        "content_hash",
        "md5hash",
        "md5",
        "sha256",
        "crc32c",
        "checksum",
        "versionid",
        "version_id",
        "generation",
        "sha",
        "oid",
        "blob_id",
        "xet_hash",
    )
)
_TIMES = frozenset(
    (
        "last-modified",
        "lastmodified",
        "last_modified",
        "mtime",
        "modified",
        "updated",
        "modify",
        "time_modified",
        "modifiedtime",
        "created",
    )
)
_FRESH_S = 2.0  # seconds after a change in which another change may get the same time stamp
_VARIES = frozenset(("url", "name", "atime", "accessed", "type", "islink", "destination", "nlink"))
_HIDDEN = re.compile(r"pass|secret|token|key|signature|credential|auth|loop|session|client", re.IGNORECASE)


class CachingFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Wraps another file system, and keeps blocks of its files on this host.

    The key of a file's blocks identifies one version of the file. It covers the file system's type, its options without
    credentials, the path, and the attributes that the source reports, for instance size, time and ETag. A changed file
    therefore has another key. The attributes are requested before a block is used, and again after a block was fetched.
    Files without a time or version are not kept. Neither are files that changed in the last two seconds.

    Args:
        target_protocol: the protocol of the other file system.
        target_options: the options of the other file system.
        fs: the other file system itself, instead of protocol and options.
        cache: the folder of the cache; by default the user's cache folder.
        quota_bytes: the most bytes that the folder may hold.
    """

    protocol = "multiring"
    cachable = False

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        cache: str | None = None,
        quota_bytes: int = QUOTA_BYTES,
        **options: Any,
    ) -> None:
        self._behind = str(options.pop("fo", ""))
        super().__init__(**options)
        if fs is None and not target_protocol:
            raise ArgumentError("multiring:: needs another URL behind it, like multiring::s3://bucket/file")
        if fs is None:
            import fsspec  # noqa: PLC0415 -- only needed if the caller passes no file system

            fs = fsspec.filesystem(target_protocol, **(target_options or {}))
        self.fs = fs
        self._untold: set[str] = set()
        self._cache = BlockCache(cache_folder() if cache is None else Path(cache), quota_bytes, tell)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return [cls._strip_protocol(each) for each in path] if isinstance(path, list) else _ALONE.sub("", str(path))

    def _inner(self, path: str) -> str:
        # fsspec passes the inner URL of a chain of URLs as `fo`; the path is then only the protocol.
        stripped: str = self.fs._strip_protocol(path or self._behind)  # noqa: SLF001 -- as fsspec's own do
        return stripped

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:  # noqa: FBT001, FBT002 -- fsspec's signature
        """List a folder of the other file system."""
        inner = self._inner(path)
        return self._asked(inner, lambda: self.fs.ls(inner, detail=detail, **options))

    def info(self, path: str, **options: Any) -> Any:
        """Return the current attributes of a file of the other file system."""
        inner = self._inner(path)

        def ask() -> Any:
            self.fs.invalidate_cache(inner)
            return self.fs.info(inner, **options)

        return self._asked(inner, ask)

    def _asked(self, inner: str, ask: Callable[[], Any]) -> Any:
        """Return the source's answer; retry after temporary errors, and remove secrets from errors."""
        failure: Exception
        try:
            return asked_again(ask, time.monotonic() + _TIMEOUT_S)
        except FileNotFoundError:
            failure = FileNotFoundError(without_secrets(inner))
        except Exception as error:  # noqa: BLE001 -- the source's library can raise any exception
            secret = secrets_of(inner, getattr(self.fs, "storage_options", None))
            kind = type(error) if type(error) in {PermissionError, IsADirectoryError, TimeoutError} else OSError
            failure = kind(f"{without_secrets(inner)}: {type(error).__name__}: {redacted(str(error), secret)}")
        # Raise the error outside the handler, so that it has no cause: the cause contains the URL with its secrets.
        raise failure

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:  # noqa: ARG002 -- fsspec's signature
        """Return a file's bytes from `start` to `end`.

        Negative offsets count from the file's end.

        Raises:
            OSError: the file cannot be read, or changed during each of 3 reads.
        """
        for _ in range(_TRIES):
            try:
                return self.piece(path, self.info(path), start, end)
            except FileChangedError as error:
                failure = error
        raise failure

    def piece(self, path: str, told: Mapping[str, Any], start: int | None, end: int | None) -> bytes:
        """Return bytes from `start` to `end` of the file version that `told` describes.

        Raises:
            FileChangedError: the file has changed.
        """
        size = self._size(path, told)
        first = 0 if start is None else max(0, start + size if start < 0 else start)
        last = size if end is None else min(size, end + size if end < 0 else end)
        key = self._key(path, told)
        pieces = []
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            begin = block * BLOCK_BYTES
            data = self._block(path, told, key, block)
            pieces.append(data[max(0, first - begin) : last - begin])
        return b"".join(pieces)

    def _size(self, path: str, told: Mapping[str, Any]) -> int:
        if told.get("size") is None:
            where = without_secrets(self._inner(path))
            raise OSError(f"{where}: the source does not report the file's size; read the file without multiring::")
        return int(told["size"])

    def _block(self, path: str, told: Mapping[str, Any], key: str | None, block: int) -> bytes:
        if key is None:
            return self._fetched(path, told, block)
        return self._cache.get(key, block, lambda: self._fetched(path, told, block))

    def _fetched(self, path: str, told: Mapping[str, Any], block: int) -> bytes:
        """Return a block from the source; raise FileChangedError if the file no longer fits the attributes `told`."""
        inner, begin = self._inner(path), block * BLOCK_BYTES
        end = min(int(told["size"]), begin + BLOCK_BYTES)
        data: bytes = self._asked(inner, lambda: self.fs.cat_file(inner, start=begin, end=end))
        if described(self.info(path)) != described(told):
            raise FileChangedError(f"{without_secrets(inner)} was changed while it was read")
        if len(data) == int(told["size"]):
            data = data[begin:end]  # the server ignores ranges and sends whole files
        if len(data) != end - begin:
            raise OSError(f"{without_secrets(inner)}: the source sent {len(data)} bytes for the range {begin} to {end}")
        return data

    def _key(self, path: str, told: Mapping[str, Any]) -> str | None:
        """Return the key of a file's blocks; None if the file may change while its attributes stay the same."""
        if not is_told_apart(told):
            where = without_secrets(self._inner(path))
            if where not in self._untold:
                self._untold.add(where)
                tell(f"{where} is not cached: it changed just now, or its source reports neither a time nor a version")
            return None
        kind = type(self.fs)
        options = {
            str(name): repr(value)
            for name, value in (getattr(self.fs, "storage_options", None) or {}).items()
            if not _HIDDEN.search(str(name))
        }
        whole = json.dumps([kind.__module__, kind.__qualname__, options, self._inner(path), described(told)])
        return f"url-{hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()}"

    def _open(self, path: str, mode: str = "rb", block_size: int = BLOCK_BYTES, **options: Any) -> Any:
        if mode != "rb":
            raise ArgumentError(
                f"cannot open {without_secrets(path)} with mode {mode!r}: multiring:: only reads; write to the URL "
                "without multiring::"
            )
        file = _CachedFile(self, path, mode, block_size, **options)
        self._size(path, file.details)
        return file


class FileChangedError(OSError):
    """A file has changed while a reader was reading it. The earlier bytes belong to the old version."""


def described(told: Mapping[str, Any]) -> list[list[str]]:
    """Return a file's attributes that change with its content, for comparisons."""
    return sorted([str(name), repr(value)] for name, value in told.items() if str(name).lower() not in _VARIES)


def is_told_apart(told: Mapping[str, Any], now: float | None = None) -> bool:
    """Return whether a file's attributes change whenever the file does.

    A version (a number, an ETag or a check sum) always changes. A time stamp suffices if it is more than two seconds
    old.
    """
    names = {str(name).lower(): value for name, value in told.items() if value is not None and value != ""}
    if any(name in _VERSIONS and not (name == "etag" and str(value).startswith("W/")) for name, value in names.items()):
        return True
    times = [found for name, value in names.items() if name in _TIMES and (found := _seconds(value)) is not None]
    return bool(times) and max(times) + _FRESH_S < (time.time() if now is None else now)


def _seconds(value: Any) -> float | None:
    """Return a time as seconds since 1970; None if the value is not a time."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value / 1000 if value > 1e11 else float(value)
    try:
        found = value if isinstance(value, datetime) else _parsed(str(value))
    except (ValueError, TypeError, IndexError):
        return None
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()


def _parsed(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return parsedate_to_datetime(text)


class _CachedFile(AbstractBufferedFile):  # type: ignore[misc]  # as above
    """A file that is open for reading.

    Reads fail if the file has changed since it was opened.
    """

    def _fetch_range(self, start: int, end: int) -> bytes:
        if described(self.fs.info(self.path)) != described(self.details):
            raise FileChangedError(f"{without_secrets(self.path)} was changed after it was opened: open it again")
        data: bytes = self.fs.piece(self.path, self.details, start, end)
        return data
