"""Pictures as a browser shows them: decoded as in training, scaled, and kept in bounded memory."""

import hashlib
import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from multiring.data.readers.limits import library
from multiring.errors import DataError, StateError
from multiring.vision.pictures import DEFAULT_LIMITS, decode_picture

SIDES = (96, 1600, 0)  # the longer side in pixels: of a list, of the view, and the whole picture
_LOSSLESS = 1 << 20  # pixels of a picture up to which the browser gets exactly the decoded ones, as PNG


class PreviewCache:
    """Encoded previews by the digest of the file and the side.

    Args:
        most_bytes: of all encoded previews together. The one that was not used for longest goes first.
        threads: how many pictures are decoded at a time.
    """

    def __init__(self, most_bytes: int = 64 << 20, threads: int = 2) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, int], tuple[str, bytes]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._decoding = threading.Semaphore(threads)

    def preview(self, folder: Path, path: str, digest: str, side: int) -> tuple[str, bytes]:
        """Return the content type and the bytes of a preview.

        Args:
            folder: the project's folder.
            path: the picture, which must be one of the project.
            digest: what a scan found. The browser must not show another picture than the one that gets the labels.
            side: one of SIDES.

        Raises:
            DataError: the file cannot be read or decoded, or its path leads out of the folder.
            StateError: the file has another digest.
        """
        key = (digest, side)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with self._decoding:
            made = _encoded(*_read(folder, path, digest), side)
        with self._lock:
            if key not in self._kept and len(made[1]) <= self._most_bytes:
                self._kept[key] = made
                self._bytes += len(made[1])
                while self._bytes > self._most_bytes:
                    _, (_, data) = self._kept.popitem(last=False)
                    self._bytes -= len(data)
        return made


def _read(folder: Path, path: str, digest: str) -> tuple[str, bytes]:
    root = os.path.realpath(folder)
    place = os.path.realpath(folder / path)
    if not Path(place).is_relative_to(root):
        raise DataError(f"picture {path!r}: the link leads out of the folder: copy the file into it")
    try:
        if not Path(place).is_file():  # a pipe would never end
            raise DataError(f"picture {path!r} is no regular file any more")
        if Path(place).stat().st_size > DEFAULT_LIMITS.record_bytes:
            raise DataError(f"picture {path!r} has more than {DEFAULT_LIMITS.record_bytes} bytes")
        data = Path(place).read_bytes()
    except OSError as error:
        raise DataError(f"picture {path!r} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StateError(f"picture {path!r} is another file now: look for changed pictures first")
    return f"picture {path!r}", data


def _encoded(what: str, data: bytes, side: int) -> tuple[str, bytes]:
    image_library: Any = library("PIL.Image", "vision")
    image = image_library.fromarray(decode_picture(what, data).pixels)
    is_scaled = 0 < side < max(image.size)
    if is_scaled:
        scale = side / max(image.size)
        size = [max(1, round(each * scale)) for each in image.size]
        image = image.resize(size, image_library.Resampling.BOX if scale < 0.5 else image_library.Resampling.BILINEAR)
    file = io.BytesIO()
    if image.width * image.height <= _LOSSLESS and (not is_scaled or side == SIDES[1]):
        image.save(file, "PNG", compress_level=1)
        return "image/png", file.getvalue()
    image.save(file, "JPEG", quality=92 if side != SIDES[0] else 80, subsampling=0)
    return "image/jpeg", file.getvalue()
