"""fsspec's protocol `multiring`: multiring::s3://bucket/file reads through this host's cache, by verified blocks.

fsspec finds it by the entry point; any program that opens URLs by fsspec has it without a change but the URL's.
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
from multiring.data.packing.manifest import BLOCK_BYTES
from multiring.data.readers.opening import tell
from multiring.data.readers.retrying import asked_again, redacted, secrets_of, without_secrets
from multiring.errors import ArgumentError

_ALONE = re.compile("^multiring:[:/]*")
_TIMEOUT_S = 60.0
_TRIES = 3  # of a file that changes while it is read
# What sources say of a file that changes whenever its content does, in fsspec's file systems' words, in lower case.
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
_FRESH_S = 2.0  # a file that was changed so lately may be changed again within the same tick of its time
_VARIES = frozenset(("url", "name", "atime", "accessed", "type", "islink", "destination", "nlink"))
_HIDDEN = re.compile(r"pass|secret|token|key|signature|credential|auth|loop|session|client", re.IGNORECASE)


class CachingFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Another file system, its files' blocks kept on this host.

    A block's key says all by which files are told apart: the file system's type and its options but for credentials,
    the path, and whatever the source says of the file, its size, its time, its ETag and the like. A file that was
    changed is another one. What the source says is asked before a block is used, and again once a block was fetched.
    A file of which it says neither a time nor a version is not kept, nor one that was changed in the last two seconds.

    Args:
        target_protocol: of the other file system.
        target_options: for it.
        fs: it, in place of both.
        cache: the folder; the user's own by default.
        quota_bytes: the most that the folder may hold.
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
            raise ArgumentError("multiring:: stands before another URL, like multiring::s3://bucket/file")
        if fs is None:
            import fsspec  # noqa: PLC0415 -- the name is an argument's

            fs = fsspec.filesystem(target_protocol, **(target_options or {}))
        self.fs = fs
        self._untold: set[str] = set()
        self._cache = BlockCache(cache_folder() if cache is None else Path(cache), quota_bytes, tell)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return [cls._strip_protocol(each) for each in path] if isinstance(path, list) else _ALONE.sub("", str(path))

    def _inner(self, path: str) -> str:
        # In a chain of URLs the one behind the protocol comes as `fo`, and the path is the protocol alone.
        stripped: str = self.fs._strip_protocol(path or self._behind)  # noqa: SLF001 -- as fsspec's own do
        return stripped

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:  # noqa: FBT001, FBT002 -- fsspec's signature
        """List a folder of the other file system."""
        inner = self._inner(path)
        return self._asked(inner, lambda: self.fs.ls(inner, detail=detail, **options))

    def info(self, path: str, **options: Any) -> Any:
        """Describe a file of the other file system, as it is now."""
        inner = self._inner(path)

        def ask() -> Any:
            self.fs.invalidate_cache(inner)
            return self.fs.info(inner, **options)

        return self._asked(inner, ask)

    def _asked(self, inner: str, ask: Callable[[], Any]) -> Any:
        """Return what the source says, asked again where it fails for a moment; its errors come without secrets."""
        failure: Exception
        try:
            return asked_again(ask, time.monotonic() + _TIMEOUT_S)
        except FileNotFoundError:
            failure = FileNotFoundError(without_secrets(inner))
        except Exception as error:  # noqa: BLE001 -- of whatever library the source needs
            secret = secrets_of(inner, getattr(self.fs, "storage_options", None))
            kind = type(error) if type(error) in {PermissionError, IsADirectoryError, TimeoutError} else OSError
            failure = kind(f"{without_secrets(inner)}: {type(error).__name__}: {redacted(str(error), secret)}")
        # Outside of the handler: the cause has the URL as it was given.
        raise failure

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:  # noqa: ARG002 -- fsspec's signature
        """Return a file's bytes from `start` to `end`; negative ones count from its end.

        Raises:
            OSError: it changes all the time.
        """
        for _ in range(_TRIES):
            try:
                return self.piece(path, self.info(path), start, end)
            except FileChangedError as error:
                failure = error
        raise failure

    def piece(self, path: str, told: Mapping[str, Any], start: int | None, end: int | None) -> bytes:
        """Return a file's bytes from `start` to `end`, of the file that `told` describes.

        Raises:
            FileChangedError: it is another one by now.
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
            raise OSError(f"{where}: the source does not say how large it is: want one that does, or no multiring::")
        return int(told["size"])

    def _block(self, path: str, told: Mapping[str, Any], key: str | None, block: int) -> bytes:
        if key is None:
            return self._fetched(path, told, block)
        return self._cache.get(key, block, lambda: self._fetched(path, told, block))

    def _fetched(self, path: str, told: Mapping[str, Any], block: int) -> bytes:
        """Return a block from the source, if the file is yet the one that `told` describes."""
        inner, begin = self._inner(path), block * BLOCK_BYTES
        end = min(int(told["size"]), begin + BLOCK_BYTES)
        data: bytes = self._asked(inner, lambda: self.fs.cat_file(inner, start=begin, end=end))
        if described(self.info(path)) != described(told):
            raise FileChangedError(f"{without_secrets(inner)} was changed while it was read")
        if len(data) == int(told["size"]):
            data = data[begin:end]  # of a server that gives whole files, whatever it is asked for
        if len(data) != end - begin:
            raise OSError(f"{without_secrets(inner)}: the source gave {len(data)} bytes for {begin} to {end}")
        return data

    def _key(self, path: str, told: Mapping[str, Any]) -> str | None:
        """Return the key of a file's blocks; None where it may change without the source's saying so."""
        if not is_told_apart(told):
            where = without_secrets(self._inner(path))
            if where not in self._untold:
                self._untold.add(where)
                tell(f"{where} is not kept: it was changed just now, or its source tells neither a time nor a version")
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
                f"{without_secrets(path)} is opened with mode {mode!r}: multiring:: reads only; write to the URL "
                "behind it"
            )
        file = _CachedFile(self, path, mode, block_size, **options)
        self._size(path, file.details)
        return file


class FileChangedError(OSError):
    """A file that was changed while it was read: what was read of it so far is of the old one."""


def described(told: Mapping[str, Any]) -> list[list[str]]:
    """Return all that a source says of a file and that changes with the file, in a form that compares."""
    return sorted([str(name), repr(value)] for name, value in told.items() if str(name).lower() not in _VARIES)


def is_told_apart(told: Mapping[str, Any], now: float | None = None) -> bool:
    """Return whether what a source says of a file changes whenever the file does.

    A version does: a number, an ETag, a check sum. A time does if it is two seconds old.
    """
    names = {str(name).lower(): value for name, value in told.items() if value is not None and value != ""}
    if any(name in _VERSIONS and not (name == "etag" and str(value).startswith("W/")) for name, value in names.items()):
        return True
    times = [found for name, value in names.items() if name in _TIMES and (found := _seconds(value)) is not None]
    return bool(times) and max(times) + _FRESH_S < (time.time() if now is None else now)


def _seconds(value: Any) -> float | None:
    """Return a point in time in seconds; None where it is none."""
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
    """A file that is open for reading: the one that it was when it was opened, to the end."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        if described(self.fs.info(self.path)) != described(self.details):
            raise FileChangedError(f"{without_secrets(self.path)} was changed after it was opened: open it again")
        data: bytes = self.fs.piece(self.path, self.details, start, end)
        return data
