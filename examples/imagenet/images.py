"""Prepare images for training and evaluation: crops, mirror images, and a network's input."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, as in torchvision's models
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # ranges for a training crop (Szegedy et al. 2015, arXiv:1409.4842)

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCrop:
    """A random part of an image, scaled to `size` pixels along a side, and mirrored at random."""

    size: int
    least_area: float = AREA[0]

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:
        """Crop the record's image."""
        image = record["image"]
        height, width = image.shape[:2]
        top, left, tall, wide = self._box(height, width, generator)
        crop = image[top : top + tall, left : left + wide]
        if generator.random() < 0.5:
            crop = crop[:, ::-1]
        return {"image": resized(crop, self.size, self.size), "label": record["label"]}

    def _box(self, height: int, width: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = height * width * generator.uniform(self.least_area, AREA[1])
            ratio = np.exp(generator.uniform(np.log(ASPECT[0]), np.log(ASPECT[1])))
            tall, wide = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
            if 0 < tall <= height and 0 < wide <= width:
                top, left = generator.integers(height - tall + 1), generator.integers(width - wide + 1)
                return int(top), int(left), int(tall), int(wide)
        side = min(height, width)
        return (height - side) // 2, (width - side) // 2, side, side


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationCrop:
    """The middle of an image: the shorter side is scaled to `size` / `share` pixels, then `size` x `size` are cut."""

    size: int
    share: float = 0.875

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:  # noqa: ARG002 -- a transform's signature
        """Crop the record's image."""
        image = record["image"]
        height, width = image.shape[:2]
        factor = round(self.size / self.share) / min(height, width)
        image = resized(image, max(self.size, round(height * factor)), max(self.size, round(width * factor)))
        top, left = (image.shape[0] - self.size) // 2, (image.shape[1] - self.size) // 2
        return {"image": image[top : top + self.size, left : left + self.size], "label": record["label"]}


def resized(image: Any, height: int, width: int) -> Any:
    """Return a uint8 image, (h, w, 3) or grey (h, w), resized to (height, width, 3)."""
    if image.ndim == 2 or image.shape[2] == 1:
        image = np.repeat(image.reshape(*image.shape[:2], 1), 3, 2)
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), Image.Resampling.BILINEAR))


def as_input(images: Any, dtype: torch.dtype) -> Tensor:
    """Return uint8 images (n, h, w, 3) as a network's input: (n, 3, h, w), normalised, channels last."""
    pixels = torch.as_tensor(images).to(dtype)
    mean, deviation = (torch.tensor(each, dtype=dtype, device=pixels.device) * 255 for each in (MEAN, DEVIATION))
    return ((pixels - mean) / deviation).permute(0, 3, 1, 2)
