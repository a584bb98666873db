"""The look of a picture in 1,152 bytes, by which near duplicates are found.

A signature is the picture's luminance in 32 x 32 cells and its two colour differences in 8 x 8 cells, each the mean
over its cell. Whether two pictures are near duplicates is the business of `duplicates`.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LUMA, CHROMA = 32, 8  # cells along a side
SIGNATURE_BYTES = LUMA * LUMA + 2 * CHROMA * CHROMA
_LUMA_OF_RGB = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601, as JPEG


def signature_of(pixels: NDArray[np.uint8]) -> bytes:
    """Return the signature of a picture.

    Args:
        pixels: uint8, (height, width, 3).
    """
    height, width, _ = pixels.shape
    luma = np.empty((LUMA, width, 3), np.float32)
    # By bands of rows: a picture of 100 million pixels as floats at once would take more than a gigabyte.
    weights = _means(height, LUMA)
    rows = max(1, (1 << 21) // width)
    luma[:] = 0
    for start in range(0, height, rows):
        band = pixels[start : start + rows].reshape(-1, width * 3).astype(np.float32)
        luma += (weights[:, start : start + rows] @ band).reshape(LUMA, width, 3)
    cells = np.einsum("ywc,xw->yxc", luma, _means(width, LUMA), optimize=True)
    grey = cells @ _LUMA_OF_RGB
    coarse = cells.reshape(CHROMA, LUMA // CHROMA, CHROMA, LUMA // CHROMA, 3).mean(axis=(1, 3))
    coarse_grey = coarse @ _LUMA_OF_RGB
    blue = 128 + (coarse[:, :, 2] - coarse_grey) * np.float32(0.564)
    red = 128 + (coarse[:, :, 0] - coarse_grey) * np.float32(0.713)
    return b"".join(np.rint(each).clip(0, 255).astype(np.uint8).tobytes() for each in (grey, blue, red))


@lru_cache(maxsize=64)
def _means(size: int, cells: int) -> NDArray[np.float32]:
    """Return the weights (cells, size) by which the mean of each cell is taken along an axis of `size` pixels."""
    edges = np.linspace(0, size, cells + 1)
    low, high = edges[:-1, None], edges[1:, None]
    starts = np.arange(size)[None, :]
    overlap = np.clip(np.minimum(high, starts + 1) - np.maximum(low, starts), 0, None)
    found: NDArray[np.float32] = (overlap / overlap.sum(axis=1, keepdims=True)).astype(np.float32)
    return found
