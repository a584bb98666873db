"""Gradient lag on devices: a program that changes this rank's gradients too early gets an error, on either path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import OPTIMIZERS, join, mean_loss, model_of, own_batch
from tests.support.ranks import Here
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import StateError

PATHS = ("staged", "nccl")
WHERE = r"^optimizer.step\(\): gradients \(that of \S+ among them\) were changed in place "
AT_ONCE = WHERE + "after the last backward, but gradient lag is already reducing copies of them"
A_STEP_LATER = WHERE + r"between the backward and the call of optimizer.step\(\) before this one, but gradient lag is"


class LaggedTraining:
    """Training with gradient lag, on this rank's device."""

    def __init__(self, here: Here, path: str) -> None:
        self._here = here
        self._device = join(here, device_path=path)
        self._steps = 0
        self.model = model_of("perceptron", self._device)
        self.optimizer: Any = mt.DistributedOptimizer(
            OPTIMIZERS["sgd"](self.model.parameters()), self.model.named_parameters(), bucket_bytes=600
        )
        self.lag = mt.gradient_lag(self.optimizer)
        self.train(2)
        assert mt.device_path().startswith(path)

    def backward(self, factor: float = 1.0) -> None:
        """Run a backward on the next batch, with the loss multiplied by `factor`."""
        self.optimizer.zero_grad()
        batch = own_batch(self._here, self._steps, "perceptron", self._device)
        (mean_loss(self.model, batch) * factor).backward()
        self._steps += 1

    def train(self, steps: int, factor: float = 1.0) -> None:
        """Take `steps` steps, whose losses are multiplied by `factor`."""
        for _ in range(steps):
            self.backward(factor)
            self.optimizer.step()

    def go_on(self) -> None:
        """Use up the gradients of a step that raised an error."""
        self.optimizer.synchronize()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]

    def gradients(self) -> list[Tensor]:
        return [each.grad for each in self.model.parameters() if each.grad is not None]

    def unscale(self) -> torch.amp.GradScaler:
        """Divide the gradients by a loss scale."""
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        scaler.scale(torch.zeros((), device=self._device))
        scaler.unscale_(self.optimizer)
        return scaler


COUNTED: dict[str, Callable[[LaggedTraining], object]] = {
    "clip_grad_norm_": lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 0.01),
    "clip_grad_value_": lambda training: nn.utils.clip_grad_value_(training.model.parameters(), 0.01),
    "one gradient": lambda training: training.gradients()[-1].mul_(0.5),
}
USES: dict[str, Callable[[LaggedTraining], object]] = {
    "the next step": lambda training: training.train(1),
    "flush": lambda training: training.lag.flush(),
    "a checkpoint": lambda training: training.optimizer.state_dict(),
}


def change_and_step(here: Here, path: str) -> None:
    training = LaggedTraining(here, path)
    for name, change in COUNTED.items():
        training.backward()
        before = training.weights()
        change(training)
        with pytest.raises(StateError, match=AT_ONCE):
            training.optimizer.step()
        assert all(map(torch.equal, training.weights(), before)), name
        training.go_on()
    training.backward()
    scaler = training.unscale()  # not counted, but the scaler's own step waits for the device
    with pytest.raises(StateError, match=AT_ONCE):
        scaler.step(training.optimizer)


@pytest.mark.parametrize("path", PATHS)
def test_a_change_that_torch_counts_is_found_by_the_step(path: str) -> None:
    run_cuda(change_and_step, path)


def unscale_and_step(here: Here, path: str) -> None:
    training = LaggedTraining(here, path)
    for name, use in USES.items():
        training.train(1)
        training.backward()
        training.unscale()
        training.optimizer.step()
        before = training.weights()
        with pytest.raises(StateError, match=A_STEP_LATER):
            use(training)
        if name == "a checkpoint":
            with pytest.raises(StateError, match=A_STEP_LATER):
                training.train(1)
        assert all(map(torch.equal, training.weights(), before)), name
        training.go_on()
        training.train(2)
        assert not all(map(torch.equal, training.weights(), before)), name


@pytest.mark.parametrize("path", PATHS)
def test_a_change_that_torch_does_not_count_is_found_before_its_gradient_is_applied(path: str) -> None:
    run_cuda(unscale_and_step, path)


def leave_alone(here: Here, path: str) -> None:
    training = LaggedTraining(here, path)
    training.train(6)
    training.optimizer.state_dict()
    training.train(2, float("nan"))
    training.lag.flush()
    assert all(bool(each.isnan().any()) for each in training.weights())


@pytest.mark.parametrize("path", PATHS)
def test_gradients_that_nobody_changes_are_not_taken_for_changed(path: str) -> None:
    run_cuda(leave_alone, path)
