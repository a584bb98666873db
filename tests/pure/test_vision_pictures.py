"""Pictures mean the same however their files store them, and a file that is no good picture is an error."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from multiring.data import Limits
from multiring.errors import DataError
from multiring.vision import decode_picture, pictures, read_picture


def stored(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gradient(height: int = 24, width: int = 40) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 9 % 256, columns * 5 % 256, (rows + columns) * 3 % 256], axis=2).astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_give_the_pixels(kind: str) -> None:
    pixels = gradient()
    found = decode_picture("a", stored(Image.fromarray(pixels), kind))
    assert (found.pixels == pixels).all()
    assert (found.width, found.height, found.format) == (40, 24, kind)
    assert (found.bits, found.is_transparent, found.is_turned, found.frames) == (8, False, False, 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture(kind: str, orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = 255  # the upper left corner is white
    # How the camera's sensor saw it, for each value of the tag: EXIF 2.3, page 37.
    seen = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    found = decode_picture("a", stored(Image.fromarray(np.ascontiguousarray(seen)), kind, exif=exif.tobytes()))
    assert found.pixels.shape == upright.shape
    assert np.abs(found.pixels.astype(int) - upright).mean() < 3
    assert found.is_turned == (orientation != 1)


def test_alpha_is_put_on_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 0], rgba[0, :, 3] = 200, (0, 128, 255)
    found = decode_picture("a", stored(Image.fromarray(rgba), "PNG"))
    # (128 * 200 + 127 * 255) / 255 = 227.4, (128 * 0 + 127 * 255) / 255 = 127
    assert found.pixels.tolist() == [[[255, 255, 255], [227, 127, 127], [200, 0, 0]]]
    assert found.is_transparent
    rgba[..., 3] = 255
    assert not decode_picture("a", stored(Image.fromarray(rgba), "PNG")).is_transparent


def test_large_pictures_are_mixed_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    rgba = np.random.default_rng(4).integers(0, 256, (23, 17, 4), np.uint8)
    data = stored(Image.fromarray(rgba), "PNG")
    whole = decode_picture("a", data).pixels
    alpha = rgba[:, :, 3:] / 255
    assert np.abs(whole - (rgba[:, :, :3] * alpha + 255 * (1 - alpha))).max() <= 0.5001
    monkeypatch.setattr(pictures, "_LARGE", 10)
    for band in (1, 40, 10_000):
        monkeypatch.setattr(pictures, "_BAND", band)
        assert (decode_picture("a", data).pixels == whole).all()
    assert pictures._ONE_LARGE.acquire(0)
    pictures._ONE_LARGE.release()


def test_all_ways_to_store_transparency_agree() -> None:
    grey = np.array([[10, 200]], np.uint8)
    alpha = np.array([[0, 255]], np.uint8)
    as_la = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    as_palette = Image.new("P", (2, 1))
    as_palette.putpalette([10, 10, 10, 200, 200, 200])
    as_palette.putpixel((1, 0), 1)
    wanted = [[[255] * 3, [200] * 3]]
    for data in (
        stored(as_la, "PNG"),
        stored(as_la.convert("RGBA"), "PNG"),
        stored(as_palette, "PNG", transparency=0),
        stored(as_palette, "GIF", transparency=0),
        stored(Image.fromarray(grey), "PNG", transparency=10),
        stored(Image.fromarray(grey).convert("RGB"), "PNG", transparency=(10, 10, 10)),
    ):
        found = decode_picture("a", data)
        assert found.pixels.tolist() == wanted
        assert found.is_transparent


def deep_png(values: np.ndarray[Any, np.dtype[np.uint16]]) -> bytes:
    """Return a 16-bit PNG of (height, width) grey or (height, width, 3) colour; Pillow writes no such colour."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    kind = 2 if values.ndim == 3 else 0
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def test_sixteen_bits_lose_the_lower_eight_in_grey_and_colour_alike() -> None:
    values = np.array([[0, 255, 256, 32767, 65535]], np.uint16)
    wanted = np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    tiff = stored(Image.fromarray(values), "TIFF")
    pgm = b"P5 5 1 65535\n" + values.astype(">u2").tobytes()
    for data in (deep_png(values), deep_png(np.repeat(values[:, :, None], 3, axis=2)), tiff, pgm):
        found = decode_picture("a", data)
        assert (found.pixels == wanted).all()
        assert found.bits == 16


def test_grey_palette_and_one_bit_are_colours() -> None:
    grey = (gradient()[:, :, 0] > 100).astype(np.uint8) * 255
    wanted = np.repeat(grey[:, :, None], 3, axis=2)
    image = Image.fromarray(grey)
    for each in (image, image.convert("1"), image.convert("P"), image.convert("RGB")):
        assert (decode_picture("a", stored(each, "PNG")).pixels == wanted).all()
        assert (decode_picture("a", stored(each, "TIFF")).pixels == wanted).all()


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_not_inverted(kind: str) -> None:
    image = Image.new("CMYK", (32, 32), (0, 255, 255, 0))  # cyan 0, magenta and yellow full: red
    found = decode_picture("a", stored(image, kind))
    assert found.mode == "CMYK"
    assert np.abs(found.pixels[16, 16].astype(int) - [255, 0, 0]).max() < 8


def test_the_first_picture_of_an_animation_counts() -> None:
    images = [Image.new("L", (8, 8), value) for value in (30, 220)]
    for kind in ("GIF", "TIFF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        found = decode_picture("a", stored(images[0], kind, save_all=True, append_images=images[1:], **options))
        assert found.frames == 2
        assert np.abs(found.pixels.astype(int) - 30).max() <= 1


def test_values_without_black_and_white_are_refused() -> None:
    for values in (np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)):
        with pytest.raises(DataError, match=r"a.tif.*(black and white|signed or float)"):
            decode_picture("a.tif", stored(Image.fromarray(values), "TIFF"))


def test_limits_hold_before_decoding(tmp_path: Path) -> None:
    bomb = bytearray(stored(Image.new("L", (8, 8)), "PNG"))
    bomb[16:24] = struct.pack(">II", 60000, 60000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(bomb[12:29])))
    with pytest.raises(DataError, match=r"3600000000 pixels|60000 x 60000 pixels"):
        decode_picture("a", bytes(bomb))
    with pytest.raises(DataError, match="claims 40 x 24 pixels: want 1 to 100"):
        decode_picture("a", stored(Image.fromarray(gradient()), "PNG"), Limits(pixels=100))
    path = tmp_path / "a.png"
    path.write_bytes(stored(Image.fromarray(gradient()), "PNG"))
    with pytest.raises(DataError, match=rf"a.png' has {path.stat().st_size} bytes: want at most 10"):
        read_picture(path, Limits(record_bytes=10))


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for data, words in ((b"", "is empty"), (b"text", "is no picture"), (b"%!PS-Adobe-3.0 EPSF-3.0\n", "is no picture")):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"a\.png' {words}"):
            read_picture(path)
    with pytest.raises(DataError, match=r"b\.png' cannot be read: No such file"):
        read_picture(tmp_path / "b.png")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_a_truncated_file_never_gives_other_pixels(kind: str) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 40, 3), np.uint8)
    data = stored(Image.fromarray(pixels), kind)
    whole = decode_picture("a", data).pixels
    refused = 0
    for length in range(1, len(data), max(1, len(data) // 60)):
        try:
            found = decode_picture("a", data[:length]).pixels
        except DataError:
            refused += 1
        else:
            assert (found == whole).all(), length
    assert refused > 40


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_damage_raises_no_other_error(kind: str) -> None:
    random = np.random.default_rng(2)
    data = np.frombuffer(stored(Image.fromarray(gradient()), kind), np.uint8)
    good = bad = 0
    for _ in range(300):
        damaged = data.copy()
        where = random.integers(0, len(data) if random.random() < 0.5 else min(len(data), 64), 3)
        damaged[where] = random.integers(0, 256, 3)
        try:
            decode_picture("a", damaged.tobytes())
            good += 1
        except DataError:
            bad += 1
    assert good + bad == 300
    assert bad
