"""Decompress files within limits; the size that a compressed file declares is not trusted."""

import bz2
import gzip
import io
import lzma
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from multiring._forks import ForkSafeLock
from multiring.data.readers.limits import Limits, damage_told, library, require_size
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError

_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_PIECE = 1 << 20
_FED = 1 << 16
_MEMORY = 1 << 27  # bytes that a decompressor may need for itself, besides its output
_KEPT = 4  # decompressed files that are kept in memory
HEAD_BYTES = 6


def codec_of(head: bytes) -> str | None:
    """Return a file's compression, from its first six bytes; None if it has none."""
    found = next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)
    if found is None and len(head) >= 2 and head[0] & 15 == 8 and (head[0] << 8 | head[1]) % 31 == 0:
        return "zlib"
    return found


def unpacked(what: str, data: bytes, codec: str, most: int) -> bytes:
    """Return the decompressed content of a file.

    Raises:
        DataError: the file is damaged or cut short, or its content exceeds `most` bytes.
    """
    errors = [OSError, EOFError, ValueError, zlib.error, lzma.LZMAError]
    if codec == "zstd":
        errors.append(library("zstandard").ZstdError)
    pieces, taken = [], 0
    with damage_told(what, *errors):
        stream = _stream(data, codec)
        while piece := stream.read(_PIECE):
            taken += len(piece)
            if taken > most:
                raise DataError(
                    f"{what} unpacks to more than {most} bytes, the limit for data that is unpacked at once"
                )
            pieces.append(piece)
    return b"".join(pieces)


def _stream(data: bytes, codec: str) -> Any:
    file = io.BytesIO(data)
    if codec == "gzip":
        return gzip.GzipFile(fileobj=file)
    if codec == "zstd":
        zstandard = library("zstandard")
        return zstandard.ZstdDecompressor(max_window_size=_MEMORY).stream_reader(file, read_across_frames=True)
    return _Pieces(codec, data)


def _decompressor(codec: str) -> Any:
    if codec == "zlib":
        return zlib.decompressobj()
    return lzma.LZMADecompressor(memlimit=_MEMORY) if codec == "xz" else bz2.BZ2Decompressor()


class _Pieces:
    """Decompresses with a decompressor of Python's library, one piece at a time.

    An .xz or .bz2 file may be a sequence of several streams, with zeros between them. Parallel compressors write such
    files.
    """

    def __init__(self, codec: str, data: bytes) -> None:
        self._codec, self._decompressor = codec, _decompressor(codec)
        self._data, self._at = memoryview(data), 0  # the data, and the offset of the next input

    def read(self, most: int) -> bytes:
        """Return the next piece of at most `most` bytes; empty at the end.

        Raises:
            EOFError: the data end before the end of a stream.
            ValueError: other data follow the stream.
        """
        while not self._decompressor.eof or self._goes_on():
            fed = self._fed()
            found: bytes = self._decompressor.decompress(fed, most)
            if found:
                return found
            if not fed and not self._decompressor.eof:
                raise EOFError("the file ends before its end mark")
        return b""

    def _fed(self) -> bytes | memoryview:
        """Return the decompressor's next input.

        Inputs are small, because the decompressor copies unused input.
        """
        left: bytes = getattr(self._decompressor, "unconsumed_tail", b"")
        if left or not getattr(self._decompressor, "needs_input", True):
            return left
        begin, self._at = self._at, min(len(self._data), self._at + _FED)
        return self._data[begin : self._at]

    def _goes_on(self) -> bool:
        """Begin the next stream, and return whether there is one."""
        self._at -= len(self._decompressor.unused_data)
        while self._at < len(self._data) and not self._data[self._at]:
            self._at += 1
        if self._at == len(self._data):
            return False
        if self._codec == "zlib":
            raise ValueError(f"{len(self._data) - self._at} bytes follow the end of the compressed data")
        self._decompressor = _decompressor(self._codec)
        return True


class UnpackedStorage:
    """A storage that decompresses some of its files, each as a whole.

    Args:
        storage: the storage of the files.
        codecs: the compression of each compressed file, by name.
        limits: the largest decompressed size.
    """

    def __init__(self, storage: Storage, codecs: Mapping[str, str], limits: Limits) -> None:
        self.url = storage.url
        self._storage, self._codecs, self._limits = storage, dict(codecs), limits
        self._sizes: dict[str, int] = {}
        self.__setstate__({})

    def names(self) -> list[str]:
        """Return the names of all files."""
        return self._storage.names()

    def size(self, name: str) -> int:
        """Return a file's decompressed size in bytes."""
        if name not in self._codecs:
            return self._storage.size(name)
        if name not in self._sizes:
            self._data(name)
        return self._sizes[name]

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on.

        Raises:
            DataError: the file is damaged or too large, or ends before `out` is full.
        """
        if name not in self._codecs:
            self._storage.read_into(name, begin, out)
            return
        data = self._data(name)
        if begin + len(out) > len(data):
            raise DataError(
                f"{self.url}/{name} ends at byte {len(data)}; bytes {begin} to {begin + len(out)} are needed"
            )
        out[:] = memoryview(data)[begin : begin + len(out)]

    def _data(self, name: str) -> bytes:
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                return found
        what = f"{self.url}/{name}"
        size = require_size(what, self._storage.size(name), self._limits.group_bytes, "the limit of a compressed file")
        found = unpacked(what, read(self._storage, name, 0, size), self._codecs[name], self._limits.group_bytes)
        with self._lock:
            self._sizes[name] = len(found)
            self._kept[name] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = ForkSafeLock()
