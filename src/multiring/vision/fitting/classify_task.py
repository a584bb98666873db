"""The task of a classifier of whole pictures."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multiring.training import TrainingTask, wilson_interval
from multiring.training.task import Batch
from multiring.vision.fitting.augmentation import PictureChange
from multiring.vision.fitting.targets import NOTHING, LabelledSample

if TYPE_CHECKING:
    from multiring.vision.models.vision_model import VisionModel

ACCURACY, BALANCED = "accuracy", "balanced accuracy"


class ClassifyTask(TrainingTask):
    """Trains one class a picture.

    Args:
        made: returns a new model.
        outputs: the names of the network's outputs; NOTHING is the last one, if it is one.
        smoothing: the share of a label that is spread over all classes.
    """

    name = "Classifier of pictures"

    def __init__(self, made: Any, outputs: tuple[str, ...], smoothing: float) -> None:
        self._made, self._outputs, self._smoothing = made, outputs, smoothing

    def model(self) -> nn.Module:
        """Return a new model."""
        found: nn.Module = self._made()
        return found

    def targets(self, sample: LabelledSample, _change: PictureChange) -> dict[str, Any]:
        """Return the number of the sample's class."""
        return {"class": np.int64(self._outputs.index(sample.class_name))}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each picture's cross-entropy, with smoothed labels."""
        return cross_entropy(
            outputs_of(model, batch),
            torch.as_tensor(batch["class"]),
            label_smoothing=self._smoothing,
            reduction="none",
        )

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each picture's cross-entropy, and a confusion matrix: true classes by guesses."""
        classes, logits = torch.as_tensor(batch["class"]), outputs_of(model, batch)
        count = len(self._outputs)
        pairs = classes * count + logits.argmax(1)
        return cross_entropy(logits, classes, reduction="none"), torch.bincount(pairs, minlength=count**2)

    def scores(self, counts: Tensor) -> dict[str, float]:
        """Return the accuracy, the mean of the classes' accuracies, and each class's accuracy, in percent."""
        matrix = counts.reshape(len(self._outputs), -1).double()
        totals, right = matrix.sum(1), matrix.diagonal()
        shares = 100 * right / totals.clamp(min=1)
        found = {ACCURACY: float(100 * right.sum() / totals.sum()), BALANCED: float(shares[totals > 0].mean())}
        for name, share, total in zip(self._outputs, shares.tolist(), totals.tolist(), strict=True):
            if total:
                found[f"class {name}" if name != NOTHING else "nothing"] = share
        return found

    def intervals(self, counts: Tensor) -> dict[str, tuple[float, float]]:
        """Return Wilson's interval of the accuracy."""
        matrix = counts.reshape(len(self._outputs), -1)
        return {ACCURACY: wilson_interval(int(matrix.diagonal().sum()), int(matrix.sum()))}

    def chance(self, counts: Tensor) -> dict[str, float]:
        """Return the accuracy of always guessing the most frequent class."""
        totals = counts.reshape(len(self._outputs), -1).sum(1)
        return {ACCURACY: float(100 * totals.max() / totals.sum())}


def outputs_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return a model's outputs for a batch of squares, as float32, or as float64 if the weights are."""
    pixels = torch.as_tensor(batch["pixels"])
    outputs: Tensor = cast("VisionModel", model).outputs(pixels.movedim(-1, -3))
    return outputs if outputs.dtype == torch.float64 else outputs.float()
