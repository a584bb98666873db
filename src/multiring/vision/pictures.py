"""Read pictures. Every part of multiring.vision reads them here, so a file means the same everywhere.

Pillow decodes. The rules, in this order:

1. The header's number of pixels is checked before anything is decoded.
2. Of an animation or a file with several pages, the first picture is read.
3. A value of more than 8 bits loses its lower bits: 16-bit grey and 16-bit colour are divided by 256, rounded down.
4. Grey becomes three equal colours. CMYK becomes RGB by Pillow's formula, without the file's colour profile.
5. Transparent pixels are put on white, by (alpha * colour + (255 - alpha) * 255) / 255, rounded to nearest.
6. The rotation and mirroring that EXIF states are applied.
"""

import io
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import require_path, shown
from multiring._forks import ForkSafeLock
from multiring.data.readers.limits import Limits, library
from multiring.errors import ArgumentError, DataError

Pixels = NDArray[np.uint8]

# Endings of the files that a scan takes as pictures. The content decides how a file is decoded.
ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"})
# Endings of JPEG files that a scan does not take.
OTHER_JPEG_ENDINGS = frozenset({".jfif", ".jpe"})
# Endings of pictures in formats that are not read. Several are TIFF files by their content, with a small preview.
UNREAD_ENDINGS = frozenset({".heic", ".heif", ".avif", ".jp2", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw"})
# EPS and others start programs, so they are not allowed.
_FORMATS = ("PNG", "WEBP", "PPM", "BMP", "TIFF", "JPEG", "GIF")
_NO_RANGE = frozenset({"I", "F"})
_ORIENTATION = 274  # the EXIF tag
_BITS, _SAMPLE_FORMAT, _UNSIGNED = 258, 339, 1  # TIFF tags, and the value for unsigned integers
_PNG, _PNG_DEPTH = b"\x89PNG\r\n\x1a\n", 24
_PPM = re.compile(rb"P[2356](?:\s+|\s*#[^\n]*\n)*\s*\d+(?:\s+|\s*#[^\n]*\n)+\d+(?:\s+|\s*#[^\n]*\n)+(\d+)")

# A large picture takes more than a gigabyte while it is decoded, so that only one thread at a time decodes such a one.
_LARGE, _ONE_LARGE = 1 << 24, ForkSafeLock()  # pixels
_BAND = 1 << 20  # pixels that are mixed with white at a time: the products have 12 bytes a pixel

DEFAULT_LIMITS = Limits(record_bytes=1 << 28)


class PictureTooLargeError(DataError):
    """A picture has more pixels, or a file more bytes, than the limits allow."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Picture:
    """A decoded picture and what its file was.

    Attributes:
        pixels: uint8, (height, width, 3): red, green, blue.
        format: the file's format by its content, such as "JPEG".
        mode: how the file stores its colours, by Pillow's names: "L" grey, "P" palette, "CMYK", "RGBA", ...
        bits: bits of a stored value.
        is_transparent: some pixel is not opaque.
        is_turned: EXIF rotated or mirrored the picture.
        frames: the number of pictures in the file, of which the first was read.
    """

    pixels: Pixels
    format: str
    mode: str
    bits: int
    is_transparent: bool
    is_turned: bool
    frames: int

    @property
    def width(self) -> int:
        """The width in pixels, after EXIF's rotation."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """The height in pixels, after EXIF's rotation."""
        return int(self.pixels.shape[0])


def read_picture(path: Path | str, limits: Limits = DEFAULT_LIMITS) -> Picture:
    """Read a picture from a file by the rules of this module.

    Args:
        path: the file.
        limits: the largest number of pixels, and of bytes of the file (`record_bytes`).

    Raises:
        DataError: the file cannot be read, is truncated or damaged, is no picture, exceeds the limits, or has values
            that have no known black and white (32-bit integers and floats). The text names the file.
    """
    path = require_path("path", path)
    what = f"picture {str(path)!r}"
    try:
        size = path.stat().st_size
        if size > limits.record_bytes:
            raise PictureTooLargeError(f"{what} has {size} bytes: want at most {limits.record_bytes}")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{what} cannot be read: {error.strerror or error}") from error
    return decode_picture(what, data, limits)


def decode_picture(what: str, data: bytes, limits: Limits = DEFAULT_LIMITS) -> Picture:
    """Decode the bytes of a file, as `read_picture` does.

    Args:
        what: the picture's name for error messages.
        data: the bytes of the file.
        limits: the largest number of pixels.

    Raises:
        ArgumentError: `data` is no bytes.
        DataError: as of `read_picture`.
    """
    image_library: Any = library("PIL.Image", "vision")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentError(f"{what}: its data are {shown(data)}: want the bytes of a file")
    data = bytes(data)
    if not data:
        raise DataError(f"{what} is empty: want a picture")
    try:
        with warnings.catch_warnings():
            # Pillow warns of odd metadata and of large pictures. The limit is checked below, and a picture whose pixels
            # can be decoded is good.
            warnings.simplefilter("ignore")
            with image_library.open(io.BytesIO(data), formats=_FORMATS) as image:
                return _decode(what, data, image, limits)
    except DataError:
        raise
    except image_library.UnidentifiedImageError as error:
        raise DataError(f"{what} is no picture that multiring reads: want {', '.join(sorted(_FORMATS))}") from error
    except image_library.DecompressionBombError as error:
        raise PictureTooLargeError(f"{what} claims too many pixels: {str(error)[:200]}") from error
    except MemoryError as error:
        raise DataError(f"{what} needs more memory than there is") from error
    # Pillow's decoders and parsers of metadata raise these for damaged files.
    except (
        OSError, ValueError, SyntaxError, OverflowError, TypeError, IndexError, KeyError, EOFError, AttributeError,
        ArithmeticError, NotImplementedError, RuntimeError,
    ) as error:  # fmt: skip
        raise DataError(f"{what} cannot be decoded: {str(error)[:200] or type(error).__name__}") from error


def _decode(what: str, data: bytes, image: Any, limits: Limits) -> Picture:
    if not 0 < image.width * image.height <= limits.pixels:
        raise PictureTooLargeError(f"{what} claims {image.width} x {image.height} pixels: want 1 to {limits.pixels}")
    with _ONE_LARGE if image.width * image.height > _LARGE else nullcontext():
        return _loaded(what, data, image)


def _loaded(what: str, data: bytes, image: Any) -> Picture:
    operations: Any = library("PIL.ImageOps", "vision")
    mode, kind, frames = image.mode, image.format, int(getattr(image, "n_frames", 1))
    bits = _bits(data, image)
    _require_range(what, image, bits)
    # Pillow turns a TIFF when it loads the pixels, and removes the tag; the others are turned below.
    is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    image.load()
    turned = operations.exif_transpose(image)
    rgb, is_transparent = _to_rgb(turned)
    return Picture(
        pixels=np.ascontiguousarray(rgb),
        format=kind,
        mode=mode,
        bits=bits,
        is_transparent=is_transparent,
        is_turned=is_turned,
        frames=frames,
    )


def _require_range(what: str, image: Any, bits: int) -> None:
    """Raise DataError if the file does not say which values are black and white."""
    is_deep_grey = image.mode == "I" and bits == 16  # how older releases of Pillow open 16-bit PNG and PGM files
    if image.mode in _NO_RANGE and not is_deep_grey:
        raise DataError(
            f"{what} has values of {bits} bits in mode {image.mode!r}, without a known black and white: want integers "
            "of 8 or 16 bits"
        )
    if _tiff_tag(image, _SAMPLE_FORMAT, _UNSIGNED) != _UNSIGNED:
        raise DataError(f"{what} has signed or float values: want unsigned integers of 8 or 16 bits")


def _to_rgb(image: Any) -> tuple[Pixels, bool]:
    """Return an image as an array (height, width, 3) on white, and whether some pixel was not opaque."""
    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2), False
    has_alpha = image.mode.lower() in {"rgba", "la", "pa"} or "transparency" in image.info
    if not has_alpha:
        return np.array(image.convert("RGB")), False
    rgba = np.array(image.convert("RGBA"))
    if bool((rgba[:, :, 3] == 255).all()):
        return rgba[:, :, :3], False
    mixed = np.empty((*rgba.shape[:2], 3), np.uint8)
    rows = max(1, _BAND // rgba.shape[1])
    for start in range(0, len(rgba), rows):
        band = rgba[start : start + rows]
        alpha = band[:, :, 3:].astype(np.uint32)
        mixed[start : start + rows] = (band[:, :, :3] * alpha + (255 - alpha) * 255 + 127) // 255
    return mixed, True


def _tiff_tag(image: Any, tag: int, default: int) -> int:
    """Return the value of a TIFF tag. If the tag has a value for each channel, return the largest value."""
    told = getattr(image, "tag_v2", {}).get(tag, default)
    return int(max(told)) if isinstance(told, tuple) else int(told)


def _bits(data: bytes, image: Any) -> int:
    """Return the bits of a value that the file declares; 8 if its format has no deeper pictures."""
    if data.startswith(_PNG):
        return data[_PNG_DEPTH]
    if (found := _PPM.match(data[:1024])) is not None:
        # Pillow scales the values to 8 or 16 bits.
        return 8 if int(found[1]) < 256 else 16
    return 32 if image.mode == "F" else _tiff_tag(image, _BITS, 8)
