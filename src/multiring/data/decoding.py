"""Images: from a file's bytes to an array, JPEG by simplejpeg (libjpeg-turbo), everything else by Pillow."""

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import Limits, library
from multiring.errors import DataError

_JPEG = b"\xff\xd8\xff"
# What Pillow may open: nothing that starts a program, as Ghostscript is started for EPS.
_FORMATS = ("PNG", "WEBP", "PPM", "BMP", "TIFF", "JPEG", "GIF")

Pixels = NDArray[np.uint8]


def decoded(what: str, data: bytes, limits: Limits) -> Pixels:
    """Return an image in colour, (height, width, 3); what its header claims is held against `limits` first.

    Args:
        what: its name, for errors.
        data: the file.
        limits: of pixels.

    Raises:
        DataError: it cannot be decoded, or is too large.
    """
    return _jpeg(what, data, limits) if data.startswith(_JPEG) else _other(what, data, limits)


def _require_pixels(what: str, width: int, height: int, limits: Limits) -> None:
    if not 0 < width * height <= limits.pixels:
        raise DataError(f"{what} claims {width} x {height} pixels: want 1 to {limits.pixels}")


def _jpeg(what: str, data: bytes, limits: Limits) -> Pixels:
    simplejpeg = library("simplejpeg")
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        _require_pixels(what, width, height, limits)
        if space not in {"CMYK", "YCCK"}:
            found: Pixels = simplejpeg.decode_jpeg(data)
            return found
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} cannot be decoded: {error}") from error
    return _other(what, data, limits)


def _other(what: str, data: bytes, limits: Limits) -> Pixels:
    image_library: Any = library("PIL.Image")
    try:
        with warnings.catch_warnings():
            # Of what it thinks large; the limit here is another.
            warnings.simplefilter("ignore", image_library.DecompressionBombWarning)
            with image_library.open(io.BytesIO(data), formats=_FORMATS) as image:
                _require_pixels(what, image.width, image.height, limits)
                return np.array(image.convert("RGB"))
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        SyntaxError,
        OverflowError,
        TypeError,
        IndexError,
        KeyError,
        EOFError,
        image_library.DecompressionBombError,
    ) as error:
        raise DataError(f"{what} cannot be decoded: {str(error)[:200] or type(error).__name__}") from error
