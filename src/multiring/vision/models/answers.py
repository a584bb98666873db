"""Turn a model's answers into labels of a project. Every part that needs labels uses this module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.errors import DataError
from multiring.vision.labels import Box, Label, Mask
from multiring.vision.models.description import ModelDescription
from multiring.vision.run_lengths import run_lengths_of

_LEAST = 1e-6  # rows of score 0 are no boxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A model's answer for one picture.

    Attributes:
        labels: the labels, the surest first. Empty: nothing is in the picture.
        scores: the score of each label, 0 to 1.
        confidence: how sure the model is of the whole answer, 0 to 1. Pictures of a low confidence are worth labelling
            by hand first.
    """

    labels: tuple[Label, ...]
    scores: tuple[float, ...]
    confidence: float


def predictions_of(description: ModelDescription, answers: Mapping[str, Any]) -> list[Prediction]:
    """Return the answers for a batch of pictures as labels, one prediction a picture.

    Args:
        description: the model's.
        answers: what `VisionModel` or its ONNX file returned, by name: arrays or tensors on the host.

    Raises:
        DataError: an answer has a number that is not finite.
    """
    for name, each in answers.items():
        values = np.asarray(each)
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            raise DataError(
                f"the model's answer has {name} that are not finite numbers: its weights are damaged, or its training "
                "diverged; train it again"
            )
    if description.kind == "detect":
        rows = zip(*(np.asarray(answers[name]) for name in ("boxes", "scores", "classes")), strict=True)
        return [_detected(description, boxes, scores, classes) for boxes, scores, classes in rows]
    if description.kind == "segment":
        maps, sure = np.asarray(answers["classes"]), np.asarray(answers["confidence"])
        return [_segmented(description, each, float(one)) for each, one in zip(maps, sure, strict=True)]
    return [_classified(description, row) for row in np.asarray(answers["probabilities"], np.float64)]


def _detected(description: ModelDescription, boxes: Any, scores: Any, classes: Any) -> Prediction:
    """Return the boxes above the threshold. The answer is as sure as its least certain box, also one left out."""
    labels, kept = [], []
    for (left, top, right, bottom), score, number in zip(
        boxes.tolist(), scores.tolist(), classes.tolist(), strict=True
    ):
        if score >= max(description.threshold, _LEAST) and right > left and bottom > top:
            name = description.classes[number]
            labels.append(Box(class_name=name, left=left, top=top, width=right - left, height=bottom - top))
            kept.append(score)
    return Prediction(
        labels=tuple(labels),
        scores=tuple(kept),
        confidence=min((abs(2 * each - 1) for each in scores.tolist()), default=1.0),
    )


def _segmented(description: ModelDescription, classes: Any, sure: float) -> Prediction:
    labels = [
        Mask(class_name=name, pixels=run_lengths_of(classes == number))
        for number, name in enumerate(description.classes, 1)
        if (classes == number).any()
    ]
    return Prediction(labels=tuple(labels), scores=(sure,) * len(labels), confidence=sure)


def _classified(description: ModelDescription, probabilities: Sequence[float]) -> Prediction:
    best = int(np.argmax(probabilities))
    sure = float(probabilities[best])
    nothing = max(0.0, 1.0 - float(np.sum(probabilities))) if description.has_nothing else 0.0
    if nothing > sure or sure < description.threshold:
        return Prediction(labels=(), scores=(), confidence=nothing if nothing > sure else 1.0 - sure)
    return Prediction(labels=(Label(class_name=description.classes[best]),), scores=(sure,), confidence=sure)
