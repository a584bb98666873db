"""The pixels inside outlines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from multiring.vision.labels import Point


def pixels_inside(outline: Sequence[Point], width: int, height: int) -> NDArray[np.bool_]:
    """Return the pixels whose centres are inside an outline, by the even-odd rule: (height, width).

    Pillow's polygons have their outlines' pixels too, so that objects would grow by half a pixel on each side.
    """
    x, y = np.array(outline, np.float64).T
    x2, y2 = np.roll(x, -1), np.roll(y, -1)
    found = np.zeros((height, width), bool)
    first, last = max(0, int(np.floor(y.min()))), min(height, int(np.ceil(y.max())))
    for row in range(first, last):
        crosses = (y <= row + 0.5) != (y2 <= row + 0.5)
        steps = (row + 0.5 - y[crosses]) / (y2[crosses] - y[crosses])
        places = np.sort(x[crosses] + steps * (x2[crosses] - x[crosses]))
        found[row] = np.searchsorted(places, np.arange(width) + 0.5) % 2 == 1
    return found
