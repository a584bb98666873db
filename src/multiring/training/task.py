"""The task of a training: what a program has to define."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from multiring.data import Samples

Batch = dict[str, Any]


class TrainingTask(ABC):
    """What a `TrainingRun` trains: data, a model, a loss and scores. A program derives its task from this class.

    A batch is a dict of the samples' fields, as `multiring.data.Loader` gives them: NumPy arrays with the samples on
    the first axis. If the run is on a GPU, arrays of numbers are tensors there. `torch.as_tensor` takes both. A rank
    can get a batch of fewer samples than the other ranks.

    Attributes:
        name: the title of the report.
        about: a sentence in the report on the data, and on conclusions that they do not allow.
        loss_unit: the unit of a sample's loss in the report.
        training: the training set, such as a `multiring.data.Dataset` or `ArrayDataset`.
        evaluations: the evaluation sets by name; the first one decides which checkpoint is best. It may be empty.
    """

    name: str = "Training"
    about: str = ""
    loss_unit: str = "nats"
    training: Samples
    evaluations: Mapping[str, Samples] = MappingProxyType({})

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new network, initialised from torch's generator, which has the run's seed."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each sample, (n,), without dividing by n: `reduction="none"` in torch's losses."""

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each sample's loss, (n,), and int64 counts, (k,), that add up over the batches of an evaluation set.

        Counts are, for example, the samples and the right guesses. By default there are none.
        """
        return self.losses(model, batch), torch.zeros(0, dtype=torch.int64)

    def scores(self, counts: Tensor) -> dict[str, float]:  # noqa: ARG002 -- derived classes use it
        """Return the scores of an evaluation set, in percent, from the sum of its counts.

        The checkpoint with the highest first score is kept as the best one. Without scores, which is the default, it is
        the checkpoint with the lowest loss.
        """
        return {}

    def intervals(self, counts: Tensor) -> dict[str, tuple[float, float]]:  # noqa: ARG002 -- derived classes use it
        """Return 95 % intervals of scores, in percent, by the scores' names; by default, none."""
        return {}

    def chance(self, counts: Tensor) -> dict[str, float]:  # noqa: ARG002 -- derived classes use it
        """Return scores of a guess without learning, in percent, by the scores' names; by default, none."""
        return {}


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of a network's weights; floating-point input of the network must have this type."""
    return next(model.parameters()).dtype
