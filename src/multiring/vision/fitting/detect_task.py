"""The task of a detector of boxes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from multiring.training import TrainingTask
from multiring.training.task import Batch
from multiring.vision.fitting.augmentation import Boxes, PictureChange
from multiring.vision.fitting.classify_task import outputs_of
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.labels import Mask
from multiring.vision.models.detector import STRIDE, best_boxes, boxes_of_maps
from multiring.vision.models.preprocessing import side_ratios

AVERAGE_PRECISION = "mAP50"
BINS = 100  # of scores, for the precision over scores
IOU = 0.5  # of a found box with a true one
_CORE = 0.54  # of a box's side: where its sides are learnt (TTFNet's alpha)
_LEAST_VISIBLE = 0.3  # of a box that a window cuts off; a smaller rest is no object
_BOX_WEIGHT = 5.0  # of the boxes' loss against the centres', as TTFNet has it


class DetectTask(TrainingTask):
    """Trains boxes of objects.

    A box that the augmentation cuts off is learnt as far as it is visible. Crowds are neither learnt nor scored, and
    nothing is learnt inside them.

    Args:
        made: returns a new model.
        classes: the names of the classes.
        size: the side of the squares.
        fit: how pictures become squares.
        most: the largest number of boxes in a picture.
    """

    name = "Detector of objects"

    def __init__(
        self, made: Callable[[], nn.Module], classes: tuple[str, ...], *, size: int, fit: str, most: int
    ) -> None:
        self._made, self._classes, self._size, self._fit, self._most = made, classes, size, fit, max(1, most)

    def model(self) -> nn.Module:
        """Return a new model."""
        return self._made()

    def targets(self, sample: LabelledSample, change: PictureChange) -> dict[str, Any]:
        """Return the maps that the network learns, and the boxes as they are.

        Returns:
            "heat", float32 (classes, rows, columns): 1 at centres, falling to 0 around them; -1 is not learnt.
            "sides", float32 (4, rows, columns): the box of a cell, and "weight" (rows, columns), 0 where there is none.
            "boxes", float32 (most, 4), "box_classes", int64 (most): -1 where there is none, -2 for a crowd.
        """
        boxes, numbers, crowds = self._boxes(sample)
        boxes = change.boxes(boxes, self._size)
        cut = boxes.clip(0, self._size)
        areas, whole = _areas(cut), _areas(boxes)
        kept = areas >= _LEAST_VISIBLE * np.maximum(whole, 1e-9)
        # A small rest of an object is no good example, and no good counterexample either.
        is_free = crowds | ~kept
        cells = self._size // STRIDE
        heat = np.zeros((len(self._classes), cells, cells), np.float32)
        sides, weight = np.zeros((4, cells, cells), np.float32), np.zeros((cells, cells), np.float32)
        for number in np.argsort(-areas, kind="stable"):  # smaller boxes are in front
            if not is_free[number]:
                _draw(heat[numbers[number]], sides, weight, cut[number])
        for number in np.flatnonzero(is_free & (areas > 0)):
            left, top, right, bottom = (cut[number] / STRIDE + 0.5).astype(int)
            part = heat[:, top:bottom, left:right]
            part[part < 1] = -1
        padded, classes = np.zeros((self._most, 4), np.float32), np.full(self._most, -1, np.int64)
        padded[: len(cut)], classes[: len(cut)] = cut, np.where(is_free, -2, numbers)
        return {"heat": heat, "sides": sides, "weight": weight, "boxes": padded, "box_classes": classes}

    def _boxes(self, sample: LabelledSample) -> tuple[Boxes, NDArray[np.int64], NDArray[np.bool_]]:
        """Return a picture's boxes in the square, their classes, and which are crowds."""
        down, across = (
            float(each) for each in side_ratios(sample.height, sample.width, self._size, self._fit, torch.device("cpu"))
        )
        bounds = [each.bounds() for each in sample.labels]
        boxes = np.array(bounds, np.float64).reshape(-1, 4) / [across, down, across, down]
        numbers = np.array([self._classes.index(each.class_name) for each in sample.labels], np.int64)
        crowds = np.array([isinstance(each, Mask) and each.is_crowd for each in sample.labels], bool)
        return boxes, numbers, crowds

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each picture's loss: focal loss of the centres, and 1 - GIoU of the boxes."""
        return self._losses(outputs_of(model, batch), batch)

    def _losses(self, maps: Tensor, batch: Batch) -> Tensor:
        heat, sides, weight = (torch.as_tensor(batch[name]).to(maps) for name in ("heat", "sides", "weight"))
        classes = len(self._classes)
        logits = maps[:, :classes]
        scores = logits.sigmoid()
        found = -((1 - scores) ** 2) * logsigmoid(logits) * (heat == 1).to(maps)
        missed = -((1 - heat) ** 4) * scores**2 * logsigmoid(-logits) * ((heat >= 0) & (heat < 1)).to(maps)
        objects = (heat == 1).sum((1, 2, 3)).clamp(min=1).to(maps)
        centres = (found + missed).sum((1, 2, 3)) / objects
        overlaps = 1 - generalised_overlap(boxes_of_maps(maps[:, classes:]), sides)
        boxes = (overlaps * weight).sum((1, 2)) / weight.sum((1, 2)).clamp(min=1e-6)
        return centres + _BOX_WEIGHT * boxes

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each picture's loss, and counts by class and bin of score: right boxes, wrong boxes, and objects."""
        maps = outputs_of(model, batch)
        found = [each.cpu().numpy() for each in best_boxes(maps, len(self._classes))]
        counts = np.zeros((len(self._classes), 2 * BINS + 1), np.int64)
        truth = [torch.as_tensor(batch[name]).cpu().numpy() for name in ("boxes", "box_classes")]
        for row in zip(*found, *truth, strict=True):
            _count(counts, *row)
        return self._losses(maps, batch), torch.from_numpy(counts.ravel())

    def scores(self, counts: Tensor) -> dict[str, float]:
        """Return the mean over classes of the average precision at an IoU of 0.5, and each class's, in percent.

        Scores are counted in bins of 0.01, so that counts add up over ranks. `multiring vision eval` has the exact
        figures of COCO.
        """
        rows = counts.numpy().reshape(len(self._classes), -1)
        each = {name: 100 * average_precision(row) for name, row in zip(self._classes, rows, strict=True) if row[-1]}
        mean = sum(each.values()) / max(1, len(each))
        return {AVERAGE_PRECISION: mean, **{f"class {name}": value for name, value in each.items()}}

    def best_threshold(self, counts: Tensor) -> float:
        """Return the lowest score of an answer, so that the F1 of all classes together is highest."""
        rows = counts.numpy().reshape(len(self._classes), -1).sum(0)
        right, wrong = (np.cumsum(rows[first : first + BINS][::-1]) for first in (0, BINS))
        balance = 2 * right / np.maximum(right + wrong + rows[-1], 1)
        return float(BINS - 1 - int(balance.argmax())) / BINS


def average_precision(row: Sequence[int] | NDArray[np.int64]) -> float:
    """Return the area under the curve of precision over recall, 0 to 1, from counts in bins of scores.

    Args:
        row: right boxes by bin, wrong boxes by bin, and the number of objects.
    """
    counts = np.asarray(row, np.float64)
    right, wrong = (np.cumsum(counts[first : first + BINS][::-1]) for first in (0, BINS))
    recall, precision = right / counts[-1], right / np.maximum(right + wrong, 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def generalised_overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the generalised IoU, -1 to 1, of boxes (n, 4, ...) with others of the same shape.

    Source: Rezatofighi et al., CVPR 2019, arXiv:1902.09630.
    """
    left, top, right, bottom = boxes.unbind(1)
    left2, top2, right2, bottom2 = others.unbind(1)
    both = (torch.minimum(right, right2) - torch.maximum(left, left2)).clamp(min=0) * (
        torch.minimum(bottom, bottom2) - torch.maximum(top, top2)
    ).clamp(min=0)
    either = (right - left) * (bottom - top) + (right2 - left2) * (bottom2 - top2) - both
    around = (torch.maximum(right, right2) - torch.minimum(left, left2)) * (
        torch.maximum(bottom, bottom2) - torch.minimum(top, top2)
    )
    return both / either.clamp(min=1e-6) - (around - either) / around.clamp(min=1e-6)


def overlaps(boxes: Boxes, others: Boxes) -> NDArray[np.float64]:
    """Return the IoU of each box (k, 4) with each of the others (m, 4): (k, m)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = (high - low).clip(min=0).prod(2)
    found: NDArray[np.float64] = both / np.maximum(_areas(boxes)[:, None] + _areas(others)[None] - both, 1e-9)
    return found


def _areas(boxes: Boxes) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]).clip(min=0).prod(1)
    return found


def _draw(heat: Any, sides: Any, weight: Any, box: Any) -> None:
    """Draw an object into its maps: a hill at its centre, and its box around the centre."""
    left, top, right, bottom = box / STRIDE
    cells = heat.shape[0]
    row, column = (min(cells - 1, int(each)) for each in ((top + bottom) / 2, (left + right) / 2))
    deviations = [max(_CORE * each / 6, 0.4) for each in (bottom - top, right - left)]
    places = np.arange(cells)
    hills = [
        np.exp(-((places - middle) ** 2) / (2 * each**2))
        for middle, each in zip((row, column), deviations, strict=True)
    ]
    hill = np.outer(*hills).astype(np.float32)
    hill[hill < 1e-3] = 0
    np.maximum(heat, hill, out=heat, where=heat >= 0)
    inside = hill > 0
    sides[:, inside] = box[:, None]
    # An object's cells count as much as its size, but large objects not much more than small ones.
    weight[inside] = hill[inside] / hill.sum() * np.log(max(np.e, (right - left) * (bottom - top)))


def _count(counts: Any, boxes: Any, scores: Any, classes: Any, truth: Any, true_classes: Any) -> None:
    """Add a picture to the counts: each box, by falling score, takes the free object that it overlaps most."""
    crowds = truth[true_classes == -2].astype(np.float64)
    for number in range(len(counts)):
        objects = truth[true_classes == number].astype(np.float64)
        counts[number, -1] += len(objects)
        chosen = (classes == number) & (scores > 0)
        own = boxes[chosen].astype(np.float64)
        matrix = overlaps(own, objects)
        for row, score, box in zip(matrix, scores[chosen], own, strict=True):
            best = int(row.argmax()) if len(row) else -1
            is_right = best >= 0 and row[best] >= IOU
            if not is_right and len(crowds) and overlaps(box[None], crowds).max() >= IOU:
                continue
            if is_right:
                matrix[:, best] = 0
            counts[number, min(BINS - 1, int(score * BINS)) + (0 if is_right else BINS)] += 1
