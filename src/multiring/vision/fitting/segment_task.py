"""The task of a segmentation: the class of every pixel."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from multiring.training import TrainingTask
from multiring.training.task import Batch
from multiring.vision.fitting.augmentation import PictureChange
from multiring.vision.fitting.classify_task import outputs_of
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.labels import Box, Label, Mask, Polygon
from multiring.vision.models.preprocessing import resize_classes
from multiring.vision.outlines import pixels_inside

MEAN_IOU = "mean IoU"
UNKNOWN = 255  # the class of a pixel that is neither learnt nor scored


class SegmentTask(TrainingTask):
    """Trains the class of every pixel: 0 for nothing, then the classes in their order.

    Args:
        made: returns a new model.
        classes: the names of the classes.
        size: the side of the squares.
        fit: how pictures become squares.
    """

    name = "Segmentation"

    def __init__(self, made: Callable[[], nn.Module], classes: tuple[str, ...], *, size: int, fit: str) -> None:
        self._made, self._classes, self._size, self._fit = made, classes, size, fit
        self._kept: dict[str, NDArray[np.uint8]] = {}

    def model(self) -> nn.Module:
        """Return a new model."""
        return self._made()

    def targets(self, sample: LabelledSample, change: PictureChange) -> dict[str, Any]:
        """Return "classes", uint8 (size, size)."""
        square = self._kept.get(sample.path)
        if square is None:
            whole = classes_of_pixels(sample.labels, self._classes, sample.width, sample.height)
            square = self._kept[sample.path] = resize_classes(whole, self._size, self._fit, UNKNOWN)
        return {"classes": change.classes(square)}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each picture's cross-entropy, averaged over its pixels of known class."""
        logits, classes = self._at_pixels(model, batch)
        return _entropy(logits, classes)

    def _at_pixels(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        classes = torch.as_tensor(batch["classes"]).long()
        logits = outputs_of(model, batch)
        return interpolate(logits, size=classes.shape[1:], mode="bilinear", align_corners=False), classes

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each picture's cross-entropy, and a confusion matrix of pixels: true classes by guesses."""
        logits, classes = self._at_pixels(model, batch)
        count, known = 1 + len(self._classes), classes != UNKNOWN
        pairs = classes[known] * count + logits.argmax(1)[known]
        return _entropy(logits, classes), torch.bincount(pairs, minlength=count**2)

    def scores(self, counts: Tensor) -> dict[str, float]:
        """Return the mean IoU over nothing and the classes that are there, and the IoU of each, in percent."""
        return overlap_scores(counts.numpy(), self._classes)


def overlap_scores(counts: NDArray[np.int64], classes: Sequence[str]) -> dict[str, float]:
    """Return the mean IoU and each class's, in percent, from a confusion matrix of pixels, flat or square."""
    matrix = counts.reshape(1 + len(classes), -1)
    hit, true, either = matrix.diagonal(), matrix.sum(1), matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    names = ("nothing", *(f"class {name}" for name in classes))
    each = {name: 100 * float(hit[n] / either[n]) for n, name in enumerate(names) if true[n]}
    return {MEAN_IOU: sum(each.values()) / max(1, len(each)), **each}


def classes_of_pixels(labels: Sequence[Label], classes: Sequence[str], width: int, height: int) -> NDArray[np.uint8]:
    """Return the class of each pixel of a picture, uint8 (height, width), 0 for nothing.

    Later labels cover earlier ones. In a box, which of the pixels are the object's is not known; in a crowd, they are.
    """
    found = np.zeros((height, width), np.uint8)
    for label in labels:
        number = classes.index(label.class_name) + 1
        if isinstance(label, Mask):
            found[label.pixels.pixels()] = number
        elif isinstance(label, Polygon):
            for outline in label.outlines:
                found[pixels_inside(outline, width, height)] = number
        elif isinstance(label, Box):
            left, top, right, bottom = (max(0, round(each)) for each in label.bounds())
            part = found[top:bottom, left:right]
            part[part == 0] = UNKNOWN
    return found


def _entropy(logits: Tensor, classes: Tensor) -> Tensor:
    known = (classes != UNKNOWN).sum((1, 2)).clamp(min=1)
    return cross_entropy(logits, classes, ignore_index=UNKNOWN, reduction="none").sum((1, 2)) / known
