"""Transforms that crop and mirror a record's image, with the random generator of its sample."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Cuts a square at a random position out of an image.

    A smaller image is first extended by mirroring its edges.

    Attributes:
        size: the square's side in pixels.
        mirrored: whether the square is mirrored left to right with probability 1/2.
        field: the record's field that holds the image (height, width, channels).
    """

    size: int
    mirrored: bool = False
    field: str = "image"

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:
        """Crop the record's image."""
        image = _at_least(record[self.field], self.size)
        top = int(generator.integers(image.shape[0] - self.size + 1))
        left = int(generator.integers(image.shape[1] - self.size + 1))
        crop = image[top : top + self.size, left : left + self.size]
        record[self.field] = crop[:, ::-1] if self.mirrored and generator.integers(2) else crop
        return record


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cuts the middle square of `size` pixels out of an image, for evaluation."""

    size: int
    field: str = "image"

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:  # noqa: ARG002 -- a transform's form
        """Crop the record's image."""
        image = _at_least(record[self.field], self.size)
        top, left = (image.shape[0] - self.size) // 2, (image.shape[1] - self.size) // 2
        record[self.field] = image[top : top + self.size, left : left + self.size]
        return record


def _at_least(image: NDArray[Any], size: int) -> NDArray[Any]:
    if image.ndim < 2 or not min(image.shape[:2]):
        raise ArgumentError(f"an image of shape {image.shape}: want (height, width, ...)")
    lacking = [max(0, size - each) for each in image.shape[:2]]
    if not any(lacking):
        return image
    return np.pad(image, [(0, each) for each in lacking] + [(0, 0)] * (image.ndim - 2), mode="symmetric")
