"""The metrics of a model's answers: the share of right classes, COCO's average precision, and the overlap of pixels.

A scoring of a run and the comparison of an exported model use the same ones.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import library
from multiring.vision.fitting.segment_task import MEAN_IOU, UNKNOWN, classes_of_pixels, overlap_scores
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.labels import Mask
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.description import ModelDescription

Curves = dict[str, list[tuple[float, float]]]


class ClassMetric:
    """The share of samples, in percent, whose answer at the model's threshold has the classes of the labels."""

    name = "accuracy"

    def __init__(self, described: ModelDescription) -> None:
        self._described = described
        self._right = self._all = 0

    def add(self, sample: LabelledSample, answers: Mapping[str, Any]) -> None:
        """Add the answers for a sample, arrays with a first axis of 1."""
        [answer] = predictions_of(self._described, answers)
        truth = {each.class_name for each in sample.labels}
        self._right += truth == {each.class_name for each in answer.labels}
        self._all += 1

    def value(self) -> float:
        """Return the metric."""
        return 100.0 * self._right / max(1, self._all)


class BoxMetric:
    """COCO's average precision of boxes. All boxes count by their scores, also those below the model's threshold."""

    name = "mAP"

    def __init__(self, described: ModelDescription) -> None:
        self._classes = described.classes
        self._images: list[dict[str, Any]] = []
        self._truths: list[dict[str, Any]] = []
        self._found: list[dict[str, Any]] = []

    def add(self, sample: LabelledSample, answers: Mapping[str, Any]) -> None:
        """Add the answers for a picture, arrays with a first axis of 1."""
        number = len(self._images) + 1
        self._images.append({"id": number, "width": sample.width, "height": sample.height})
        for label in sample.labels:
            bounds = label.bounds()
            if bounds is None:
                continue
            box = [*bounds[:2], bounds[2] - bounds[0], bounds[3] - bounds[1]]
            self._truths.append(
                {
                    "id": len(self._truths) + 1,
                    "image_id": number,
                    "category_id": self._classes.index(label.class_name) + 1,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": int(isinstance(label, Mask) and label.is_crowd),
                }
            )
        rows = (np.asarray(answers[name])[0].tolist() for name in ("boxes", "scores", "classes"))
        self._found += [
            {
                "image_id": number,
                "category_id": one + 1,
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "score": score,
            }
            for box, score, one in zip(*rows, strict=True)
            if score > 0
        ]

    def value(self) -> float:
        """Return the mean over IoU thresholds of 0.5 to 0.95 and over classes, in percent."""
        return self.figures()[0][self.name]

    def figures(self) -> tuple[dict[str, float], dict[str, dict[str, float]], Curves]:
        """Return COCO's figures in percent, those of each class, and the classes' curves at an IoU of 0.5."""
        coco = library("faster_coco_eval", "vision")
        known = {"categories": [{"id": n, "name": name} for n, name in enumerate(self._classes, 1)]}
        truth = coco.COCO({"images": self._images, "annotations": self._truths, **known})
        if not self._found or not self._truths:
            return {"mAP": 0.0, "mAP50": 0.0, "mAP75": 0.0}, {}, {}
        judge = coco.COCOeval_faster(truth, truth.loadRes(self._found), iouType="bbox")
        judge.evaluate()
        judge.accumulate()
        # (IoU thresholds, recalls, classes, areas, most boxes); -1 where a class has no object
        precision = np.asarray(judge.eval["precision"])[:, :, :, 0, -1]
        steps = np.linspace(0, 1, precision.shape[1]).tolist()
        by_class: dict[str, dict[str, float]] = {}
        curves: Curves = {}
        for number, name in enumerate(self._classes):
            rows = precision[:, :, number]
            if (rows > -1).any():
                by_class[name] = {"AP": 100 * float(rows.mean()), "AP50": 100 * float(rows[0].mean())}
                curves[name] = list(zip(steps, rows[0].tolist(), strict=True))
        there = precision[:, :, [self._classes.index(name) for name in by_class]]
        figures = {"mAP50": there[0].mean(), "mAP": there.mean(), "mAP75": there[5].mean()}
        return {name: 100 * float(each) for name, each in figures.items()}, by_class, curves


class PixelMetric:
    """The mean over classes of the IoU of all pixels of known class.

    Attributes:
        confusion: pixels by true class and answer; class 0 is "nothing".
    """

    name = MEAN_IOU

    def __init__(self, described: ModelDescription) -> None:
        self._classes = described.classes
        self.confusion: NDArray[np.int64] = np.zeros((1 + len(self._classes),) * 2, np.int64)

    def add(self, sample: LabelledSample, answers: Mapping[str, Any]) -> NDArray[np.int64]:
        """Add the answers for a picture, arrays with a first axis of 1, and return its own confusion."""
        count = len(self.confusion)
        guess = np.asarray(answers["classes"])[0]
        truth = classes_of_pixels(sample.labels, self._classes, sample.width, sample.height)
        known = truth != UNKNOWN
        pairs = truth[known].astype(np.int64) * count + guess[known]
        own: NDArray[np.int64] = np.bincount(pairs, minlength=count**2).reshape(count, count)
        self.confusion += own
        return own

    def value(self) -> float:
        """Return the metric in percent."""
        return self.by_name()[self.name]

    def by_name(self) -> dict[str, float]:
        """Return the mean IoU and each class's, in percent, as `overlap_scores` names them."""
        return overlap_scores(self.confusion, self._classes)


def metric_for(described: ModelDescription) -> ClassMetric | BoxMetric | PixelMetric:
    """Return a new metric for the kind of a model."""
    if described.kind == "detect":
        return BoxMetric(described)
    return PixelMetric(described) if described.kind == "segment" else ClassMetric(described)


def one_answer(answers: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a picture's answers from those of a batch, arrays with a first axis of 1."""
    return {name: each[number : number + 1] for name, each in answers.items()}
