"""Decode a region of a JPEG by libjpeg-turbo, without most of the work for the pixels beside it.

The pixels are those of decoding the whole file by simplejpeg, which is libjpeg-turbo, too. A build of multiring without
libjpeg-turbo's headers lacks the function; then, `size_of` returns None.
"""

import ctypes
from collections.abc import Sequence
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


Data = bytes | memoryview  # of a file


def size_of(data: Data) -> tuple[int, int] | None:
    """Return the height and the width in a JPEG's header.

    The result is None if this build cannot decode regions, if the header is damaged, or if the colours are not grey,
    RGB or YCbCr.
    """
    library = _library()
    if library is None:
        return None
    height, width = ctypes.c_long(), ctypes.c_long()
    is_sound = library.multiring_jpeg_size(_address_of(data), len(data), height, width)
    return (height.value, width.value) if is_sound else None


@dataclass(frozen=True, slots=True)
class WantedRegion:
    """A region to decode.

    Attributes:
        data: the file.
        size: the result of `size_of`.
        region: a region in the image.
        pixels: the array (height, width, 3) of uint8 that gets the region. Its memory has no gaps.
        is_sound: whether it is known that the file can be decoded. Otherwise the rest of the file is read, too: damage
            in the region often shows only at the end.
    """

    data: Data
    size: tuple[int, int]
    region: Region
    pixels: NDArray[np.uint8]
    is_sound: bool = False


def decode_regions(wanted: Sequence[WantedRegion]) -> list[bool]:
    """Decode regions into their arrays, without Python's lock, and return for each whether its file was sound.

    Raises:
        ValueError: a region exceeds its image, or an array has another shape, type or layout than its region needs.
    """
    library = _library()
    if library is None or not wanted:
        return [False] * len(wanted)
    for each in wanted:
        shape = (each.region.height, each.region.width, _CHANNELS)
        if not each.region.is_in(*each.size):
            raise ValueError(f"{each.region} exceeds an image of {each.size}")
        if each.pixels.shape != shape or each.pixels.dtype != np.uint8 or not each.pixels.flags.c_contiguous:
            raise ValueError(f"an array {each.pixels.dtype} {each.pixels.shape}: want uint8 {shape} without gaps")
    count = len(wanted)
    boxes = [(each.region.top, each.region.left, each.region.height, each.region.width) for each in wanted]
    row = np.empty(max(each.size[1] for each in wanted) * _CHANNELS, np.uint8)
    results = (ctypes.c_bool * count)()
    library.multiring_jpeg_regions(
        count,
        (ctypes.c_void_p * count)(*(_address_of(each.data) for each in wanted)),
        (ctypes.c_size_t * count)(*(len(each.data) for each in wanted)),
        (ctypes.c_long * (4 * count))(*(number for box in boxes for number in box)),
        (ctypes.c_void_p * count)(*(_address(each.pixels) for each in wanted)),
        _address(row),
        row.nbytes,
        (ctypes.c_bool * count)(*(not each.is_sound for each in wanted)),
        results,
    )
    return list(results)


def _address_of(data: Data) -> int:
    """Return the address of a file in memory."""
    return _address(np.frombuffer(data, np.uint8)) if data else 0


def _address(array: NDArray[np.uint8]) -> int:
    """Return the address of an array; `array.ctypes.data` takes four times as long."""
    found: int = array.__array_interface__["data"][0]
    return found


def is_available() -> bool:
    """Return whether this build can decode regions."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_FILE))
    except OSError:  # built without libjpeg-turbo, or for a machine that had it
        return None
    file, size, length = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
    library.multiring_jpeg_size.argtypes = (file, size, ctypes.POINTER(length), ctypes.POINTER(length))
    library.multiring_jpeg_regions.argtypes = (
        size,
        ctypes.POINTER(file),
        ctypes.POINTER(size),
        ctypes.POINTER(length),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
        size,
        ctypes.POINTER(ctypes.c_bool),
        ctypes.POINTER(ctypes.c_bool),
    )
    library.multiring_jpeg_size.restype = ctypes.c_bool
    library.multiring_jpeg_regions.restype = None
    return library
