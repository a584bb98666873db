"""Turn a model's answers into labels of a project. Every part that needs labels uses this module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.vision.labels import Label
from multiring.vision.models.description import ModelDescription


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
    """
    return [_classified(description, row) for row in np.asarray(answers["probabilities"], np.float64)]


def _classified(description: ModelDescription, probabilities: Sequence[float]) -> Prediction:
    best = int(np.argmax(probabilities))
    sure = float(probabilities[best])
    nothing = max(0.0, 1.0 - float(np.sum(probabilities))) if description.has_nothing else 0.0
    if nothing > sure or sure < description.threshold:
        return Prediction(labels=(), scores=(), confidence=nothing if nothing > sure else 1.0 - sure)
    return Prediction(labels=(Label(class_name=description.classes[best]),), scores=(sure,), confidence=sure)
