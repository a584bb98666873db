"""Decode a region of a JPEG by libjpeg-turbo, without most of the work for the pixels beside it.

The pixels are those of decoding the whole file by simplejpeg, which is libjpeg-turbo, too. A build of multiring without
libjpeg-turbo's headers lacks the function; then, `region_of` returns None.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_FILE = Path(__file__).parents[1] / "_native" / "_jpeg.so"
_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of an image, in pixels from its upper left corner."""

    top: int
    left: int
    height: int
    width: int

    def is_in(self, height: int, width: int) -> bool:
        """Return whether an image of `height` x `width` pixels contains the region, and the region has a pixel."""
        return (
            min(self.top, self.left) >= 0
            and min(self.height, self.width) > 0
            and self.top + self.height <= height
            and self.left + self.width <= width
        )


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return the height and the width in a JPEG's header.

    The result is None if this build cannot decode regions, if the header is damaged, or if the colours are not grey,
    RGB or YCbCr.
    """
    library = _library()
    if library is None:
        return None
    height, width = ctypes.c_long(), ctypes.c_long()
    is_sound = library.multiring_jpeg_size(data, len(data), height, width)
    return (height.value, width.value) if is_sound else None


def region_of(
    data: bytes, size: tuple[int, int], region: Region, *, is_sound: bool = False
) -> NDArray[np.uint8] | None:
    """Return a region of a JPEG as an array (height, width, 3) of uint8, or None if the file cannot be decoded.

    Args:
        data: the file.
        size: the result of `size_of`.
        region: a region in the image.
        is_sound: whether it is known that the file can be decoded. Otherwise the rest of the file is read, too: damage
            in the region often shows only at the end.
    """
    library = _library()
    if library is None or not region.is_in(*size):
        return None
    pixels = np.empty((region.height, region.width, _CHANNELS), np.uint8)
    row = np.empty(size[1] * _CHANNELS, np.uint8)
    is_whole = library.multiring_jpeg_region(
        data,
        len(data),
        *(region.top, region.left, region.height, region.width),
        pixels.ctypes.data,
        row.ctypes.data,
        row.nbytes,
        not is_sound,
    )
    return pixels if is_whole else None


def is_available() -> bool:
    """Return whether this build can decode regions."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_FILE))
    except OSError:  # built without libjpeg-turbo, or for a machine that had it
        return None
    file, size, length = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long
    library.multiring_jpeg_size.argtypes = (file, size, ctypes.POINTER(length), ctypes.POINTER(length))
    pixels = ctypes.c_void_p
    library.multiring_jpeg_region.argtypes = (file, size, *[length] * 4, pixels, pixels, size, ctypes.c_bool)
    for each in (library.multiring_jpeg_size, library.multiring_jpeg_region):
        each.restype = ctypes.c_bool
    return library
