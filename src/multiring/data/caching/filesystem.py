"""fsspec's protocol `multiring`: multiring::s3://bucket/file reads through this host's cache, by verified blocks.

fsspec finds it by the entry point; any program that opens URLs by fsspec has it without a change but the URL's.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from multiring.data.caching.blocks import QUOTA_BYTES, BlockCache
from multiring.data.caching.mapped import cache_folder
from multiring.data.packing.manifest import BLOCK_BYTES
from multiring.data.readers.opening import tell
from multiring.errors import ArgumentError

_ALONE = re.compile("^multiring:[:/]*")


class CachingFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Another file system, its files' blocks kept on this host.

    A block belongs to a file as the source describes it (its size, its time or ETag): a file that was changed is
    another one.

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
        return self.fs.ls(self._inner(path), detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        """Describe a file of the other file system."""
        return self.fs.info(self._inner(path), **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:  # noqa: ARG002 -- fsspec's signature
        """Return a file's bytes from `start` to `end`; negative ones count from its end."""
        size = int(self.info(path)["size"])
        first = 0 if start is None else max(0, start + size if start < 0 else start)
        last = size if end is None else min(size, end + size if end < 0 else end)
        key = self._key(path)
        pieces = []
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            begin = block * BLOCK_BYTES
            data = self._cache.get(key, block, lambda begin=begin: self._fetched(path, begin, size))  # type: ignore[misc]
            pieces.append(data[max(0, first - begin) : last - begin])
        return b"".join(pieces)

    def _fetched(self, path: str, begin: int, size: int) -> bytes:
        end = min(size, begin + BLOCK_BYTES)
        data: bytes = self.fs.cat_file(self._inner(path), start=begin, end=end)
        if len(data) != end - begin:
            raise OSError(f"{path}: the source gave {len(data)} bytes for {begin} to {end}")
        return data

    def _key(self, path: str) -> str:
        inner = self._inner(path)
        told = f"{type(self.fs).__qualname__} {inner} {self.fs.ukey(inner)}"
        return f"url-{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}"

    def _open(self, path: str, mode: str = "rb", block_size: int = BLOCK_BYTES, **options: Any) -> Any:
        if mode != "rb":
            raise ArgumentError(
                f"{path} is opened with mode {mode!r}: multiring:: reads only; write to the URL behind it"
            )
        return _CachedFile(self, path, mode, block_size, **options)


class _CachedFile(AbstractBufferedFile):  # type: ignore[misc]  # as above
    """A file that is open for reading."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data
