"""Decode images to arrays: JPEG by simplejpeg (libjpeg-turbo), all other formats by Pillow.

A region of a JPEG is decoded without most of the work for the pixels beside it; see multiring.data.jpeg.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.jpeg import Region, WantedRegion, decode_regions, size_of
from multiring.data.readers.limits import Limits, library
from multiring.data.readers.source import Image
from multiring.errors import DataError

_JPEG = b"\xff\xd8\xff"
# The formats that Pillow may open. Formats for which Pillow starts a program are not allowed: EPS starts Ghostscript.
_FORMATS = ("PNG", "WEBP", "PPM", "BMP", "TIFF", "JPEG", "GIF")

_DEEP = {"I": np.int32, "F": np.float32, "I;16": np.uint16, "I;16L": np.uint16, "I;16B": np.uint16}
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24  # offset of the bits per channel in a PNG file
_PPM = re.compile(rb"P[2356](?:\s+|\s*#[^\n]*\n)*\s*\d+(?:\s+|\s*#[^\n]*\n)+\d+(?:\s+|\s*#[^\n]*\n)+(\d+)")
_TIFF_DEPTHS, _TIFF_FORMATS = 258, 339
_UNSIGNED, _SIGNED = 1, 2  # values of the TIFF tag 339, the sample format

Pixels = NDArray[Any]


def decoded(what: str, data: bytes, limits: Limits) -> Pixels:
    """Return an image as an array (height, width, 3).

    The array is uint8, from 0 for black to 255 for white. A grey image of more than 8 bits keeps its values and its
    type: uint16, int32, uint32 or float32. The size in the header is checked against `limits` before decoding.

    Args:
        what: the image's name for error messages.
        data: the bytes of the file.
        limits: the largest number of pixels.

    Raises:
        DataError: the image cannot be decoded or is too large; or the library would change its values. The library
            changes colours of more than 8 bits, signed values of 8 bits, and some grey values, which it scales.
    """
    return _jpeg(what, data, limits) if data.startswith(_JPEG) else _other(what, data, limits)


class RegionDecoding:
    """The decoding of a region of an image: what it needs, then, in `decode_together`, the pixels.

    The pixels are those of `decoded`, and damaged files are refused as there.

    Args:
        what: the image's name for error messages.
        image: the file. If it is known to be sound, nothing behind the region is read.
        limits: the largest number of pixels.
        choose: called once with the image's height and width; returns the region. It may exceed the image.

    Raises:
        DataError: as for `decoded`. Damage that the header does not show is an error of `result`.
    """

    __slots__ = ("_limits", "_size", "_what", "_whole", "image", "pixels", "region")

    def __init__(self, what: str, image: Image, limits: Limits, choose: Callable[[int, int], Region]) -> None:
        self._what, self.image, self._limits = what, image, limits
        self._size = size_of(image.data) if bytes(image.data[: len(_JPEG)]) == _JPEG else None
        self._whole = None
        self.pixels: Pixels | None = None
        if self._size is not None:
            _require_pixels(what, self._size[1], self._size[0], limits)
            self.region = choose(*self._size)
        else:
            self._whole = decoded(what, bytes(image.data), limits)
            self.region = choose(*self._whole.shape[:2])

    def wanted(self, out: Pixels | None) -> WantedRegion | None:
        """Return what to decode, or None if the region cannot be decoded by itself.

        Args:
            out: where the pixels are put if shape and type fit.
        """
        region = self.region
        if self._size is None or not region.is_in(*self._size):
            return None
        shape = (region.height, region.width, 3)
        fits = out is not None and out.shape == shape and out.dtype == np.uint8 and out.flags.c_contiguous
        pixels = out if out is not None and fits else np.empty(shape, np.uint8)
        return WantedRegion(self.image.data, self._size, region, pixels, is_sound=self.image.is_sound)

    def result(self) -> tuple[Pixels, Region]:
        """Return the region or more of the image, and where the region lies in what was returned.

        Raises:
            DataError: the image cannot be decoded.
        """
        if self.pixels is not None:
            return self.pixels, Region(0, 0, self.region.height, self.region.width)
        if self._whole is None:  # the region exceeds the image, or the file is damaged; then, `decoded` says how
            self._whole = decoded(self._what, bytes(self.image.data), self._limits)
        return self._whole, self.region

    def keep(self) -> None:
        """Copy what `result` still needs out of memory that is reused."""
        if self.pixels is None and self._whole is None:
            self.image = Image(bytes(self.image.data), self.image.is_sound)


def decode_together(decodings: Sequence[RegionDecoding], outs: Sequence[Pixels | None]) -> None:
    """Decode regions by one native call. Afterwards, the memory of their files is not needed any more.

    Args:
        decodings: of images, whose `result` is then their pixels.
        outs: for each, an array that may get its pixels, or None.
    """
    pairs = [(each, each.wanted(out)) for each, out in zip(decodings, outs, strict=True)]
    able = [(each, wanted) for each, wanted in pairs if wanted is not None]
    for (each, wanted), is_sound in zip(able, decode_regions([wanted for _, wanted in able]), strict=True):
        each.pixels = wanted.pixels if is_sound else None
    for each in decodings:
        each.keep()


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
            # Pillow warns of large images by its own limit; `_require_pixels` applies the limit of `limits`.
            warnings.simplefilter("ignore", image_library.DecompressionBombWarning)
            with image_library.open(io.BytesIO(data), formats=_FORMATS) as image:
                _require_pixels(what, image.width, image.height, limits)
                _require_depth(what, _depth(data, image), image)
                if image.mode in _DEEP:
                    grey = np.array(image).astype(_deep(what, data, image), copy=False)
                    return np.repeat(grey[:, :, None], 3, axis=2)
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


def _require_depth(what: str, depth: int, image: Any) -> None:
    if image.mode in _DEEP:
        return
    if _tiffs(image, _TIFF_FORMATS, _UNSIGNED) == _SIGNED:
        raise DataError(
            f"{what} has signed values of {depth} bits, which Pillow reads as unsigned: want decode=False and "
            "another library, or values of 16 bits"
        )
    if depth > 8:
        raise DataError(
            f"{what} has colours of {depth} bits, which Pillow narrows to 8: want decode=False and another library, or "
            "images of 8 bits, or grey images of 16 bits"
        )


def _deep(what: str, data: bytes, image: Any) -> Any:
    """Return the type of a grey image of more than 8 bits.

    Raises:
        DataError: Pillow would scale the image's values.
    """
    found = _PPM.match(data[:1024])
    if found is not None and int(found[1]) != np.iinfo(np.uint16).max:
        raise DataError(
            f"{what} has values up to {int(found[1])}, which Pillow scales to 65535: want decode=False and another "
            "library, or a PGM of values up to 65535, or a PNG"
        )
    # Pillow returns integers of 32 bits as signed, even if the file stores unsigned integers.
    is_unsigned = image.mode == "I" and _tiffs(image, _TIFF_DEPTHS, 0) == 32
    is_unsigned &= _tiffs(image, _TIFF_FORMATS, _UNSIGNED) == _UNSIGNED
    return np.uint32 if is_unsigned else _DEEP[image.mode]


def _tiffs(image: Any, tag: int, default: int) -> int:
    """Return the value of a TIFF tag. If the tag has a value for each channel, return the largest value."""
    told = getattr(image, "tag_v2", {}).get(tag, default)
    return int(max(told)) if isinstance(told, tuple) else int(told)


def _depth(data: bytes, image: Any) -> int:
    """Return the bits per channel that the file declares; 8 if its format has no deeper images."""
    if data.startswith(_PNG):
        return data[_PNG_DEPTH]
    if (found := _PPM.match(data[:1024])) is not None:
        return int(found[1]).bit_length()
    return _tiffs(image, _TIFF_DEPTHS, 8)
