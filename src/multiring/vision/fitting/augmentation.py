"""Random changes of training pictures that keep what they show: turns, windows and colours."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import library

Pixels = NDArray[np.uint8]
Boxes = NDArray[np.float64]
_MOST_STRETCH = 1.25  # of a window's sides against each other


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentationPolicy:
    """How much pictures change. See the options of the same names in `VisionOptions`."""

    mirror: bool
    turns: bool
    crop: float
    colour: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureChange:
    """One change of a square picture: mirror, then turn, then cut out a window and resize it to the whole square.

    Attributes:
        is_mirrored: left and right are exchanged.
        turns: turns by 90 degrees, counterclockwise.
        window: left, top, right and bottom of the window as shares of the side, 0 to 1.
        gains: factors of saturation, contrast and brightness.
    """

    is_mirrored: bool
    turns: int
    window: tuple[float, float, float, float]
    gains: tuple[float, float, float]

    def pixels(self, square: Pixels) -> Pixels:
        """Return the changed picture, uint8 (side, side, 3), or clip, (frames, side, side, 3)."""
        if square.ndim == 4:
            return np.stack([self.pixels(each) for each in square])
        return _coloured(self._moved(square, "BILINEAR"), self.gains)

    def classes(self, square: Pixels) -> Pixels:
        """Return the changed classes of pixels, uint8 (side, side)."""
        return self._moved(square, "NEAREST")

    def boxes(self, boxes: Boxes, side: int) -> Boxes:
        """Return the changed boxes; their sides may be outside the square.

        Args:
            boxes: (k, 4): left, top, right and bottom in pixels.
            side: of the square.
        """
        left, top, right, bottom = boxes.T
        if self.is_mirrored:
            left, right = side - right, side - left
        for _ in range(self.turns):
            left, top, right, bottom = top, side - right, bottom, side - left
        first, second, third, fourth = (side * each for each in self.window)
        across, down = side / (third - first), side / (fourth - second)
        return np.stack(
            [(left - first) * across, (top - second) * down, (right - first) * across, (bottom - second) * down], axis=1
        )

    def _moved(self, square: Pixels, resampling: str) -> Pixels:
        image_library: Any = library("PIL.Image", "vision")
        if self.is_mirrored:
            square = square[:, ::-1]
        square = np.ascontiguousarray(np.rot90(square, self.turns))
        if self.window == (0.0, 0.0, 1.0, 1.0):
            return square
        side = len(square)
        box = tuple(side * each for each in self.window)
        image = image_library.fromarray(square)
        chosen = getattr(image_library.Resampling, resampling)
        found: Pixels = np.asarray(image.resize((side, side), chosen, box=box))
        return found


UNCHANGED = PictureChange(is_mirrored=False, turns=0, window=(0.0, 0.0, 1.0, 1.0), gains=(1.0, 1.0, 1.0))


def draw_change(policy: AugmentationPolicy, generator: np.random.Generator) -> PictureChange:
    """Return a random change. It always draws equally many numbers."""
    mirrored, turned, area, stretch, x, y, saturation, contrast, brightness = generator.random(9)
    part = 1 - policy.crop * area
    ratio = _MOST_STRETCH ** ((2 * stretch - 1) if policy.crop else 0.0)
    width, height = min(1.0, np.sqrt(part * ratio)), min(1.0, np.sqrt(part / ratio))
    left, top = (1 - width) * x, (1 - height) * y
    return PictureChange(
        is_mirrored=bool(policy.mirror and mirrored < 0.5),
        turns=int(4 * turned) if policy.turns else 0,
        window=(float(left), float(top), float(left + width), float(top + height)),
        gains=tuple(1 + policy.colour * (2 * each - 1) for each in (saturation, contrast, brightness)),
    )


def _coloured(pixels: Pixels, gains: tuple[float, float, float]) -> Pixels:
    """Return a picture with another saturation, contrast and brightness."""
    if gains == (1.0, 1.0, 1.0):
        return pixels
    saturation, contrast, brightness = gains
    values = pixels.astype(np.float32)
    grey = values.mean(axis=2, keepdims=True)
    values = grey + saturation * (values - grey)
    middle = float(grey.mean())
    values = brightness * (middle + contrast * (values - middle))
    found: Pixels = np.clip(values + 0.5, 0, 255).astype(np.uint8)
    return found
