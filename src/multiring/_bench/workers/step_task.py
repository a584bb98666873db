"""The compute of one rank in a training step: a network's gradients on the rank's own samples."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from multiring._bench.workers.step_case import StepCase
from multiring._bench.workers.step_models import NETWORKS

LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class StepTask:
    """One rank's network and batch.

    All ranks have the same weights and different samples. On a GPU, the rank's device is `device`.
    """

    device = torch.device("cpu")
    is_verified = False

    def __init__(self, case: StepCase, rank: int, local_rank: int = 0) -> None:
        self.case = case
        self.rank = rank
        network = NETWORKS[case.network]
        torch.manual_seed(0)
        self.model = network.make()
        if case.device == "cuda":
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            self.model.to(self.device)
        self.model.to(memory_format=network.memory_format)  # type: ignore[call-overload] # torch has no stub for it
        torch.manual_seed(1 + rank)
        inputs, targets = network.samples(case.batch, case.image_size)
        self._inputs, self._targets = inputs.to(self.device), targets.to(self.device)
        self._loss = network.loss

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a plain optimizer of the model."""
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def backward(self, model: nn.Module) -> None:
        """Run forward and backward of `model`, the task's model or a wrapper of it, on the rank's batch."""
        self.forward(model).backward()  # type: ignore[no-untyped-call] # torch's own

    def forward(self, model: nn.Module) -> Tensor:
        """Return the loss of the rank's batch."""
        # Kernels of a GPU need not give the same bits twice. In float32, the difference is far below the tolerance.
        is_half = self.case.dtype == "bfloat16" and (self.is_verified or self.device.type == "cpu")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_half):
            outputs = model(self._inputs)
        return self._loss(outputs.float(), self._targets)

    def reproducible_backward(self, model: nn.Module) -> None:
        """Run `backward` with dropout that is the same every time and differs between ranks."""
        torch.manual_seed(1000 + self.rank)
        with _reproducible_kernels():
            self.backward(model)

    def verified(self) -> None:
        """Announce that the following steps are only timed."""
        self.is_verified = True

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _reproducible_kernels() -> Iterator[None]:
    """Let cuDNN choose algorithms whose results have the same bits every time."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
