"""The compute of one rank in a training step: a network's gradients on the rank's own samples."""

import torch
from torch import Tensor, nn

from multiring._bench.workers.step_case import StepCase
from multiring._bench.workers.step_models import NETWORKS

LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class StepTask:
    """One rank's network and batch.

    All ranks have the same weights and different samples.
    """

    def __init__(self, case: StepCase, rank: int) -> None:
        self.case = case
        self.rank = rank
        network = NETWORKS[case.network]
        torch.manual_seed(0)
        self.model = network.make()
        self.model.to(memory_format=network.memory_format)  # type: ignore[call-overload] # torch has no stub for it
        torch.manual_seed(1 + rank)
        self._inputs, self._targets = network.samples(case.batch, case.image_size)
        self._loss = network.loss

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a plain optimizer of the model."""
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def backward(self, model: nn.Module) -> None:
        """Run forward and backward of `model`, the task's model or a wrapper of it, on the rank's batch."""
        self.forward(model).backward()  # type: ignore[no-untyped-call] # torch's own

    def forward(self, model: nn.Module) -> Tensor:
        """Return the loss of the rank's batch."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bfloat16"):
            outputs = model(self._inputs)
        return self._loss(outputs.float(), self._targets)

    def reproducible_backward(self, model: nn.Module) -> None:
        """Run `backward` with dropout that is the same every time and differs between ranks."""
        torch.manual_seed(1000 + self.rank)
        self.backward(model)

    def verified(self) -> None:
        """Announce that the following steps are only timed."""
