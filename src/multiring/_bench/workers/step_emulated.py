"""A training step that sleeps instead of computing; gradients of the network's sizes arrive at realistic times.

Ranks of several virtual hosts on one machine share its cores. With real compute, a step of four hosts would take as
long as four steps, and would hide the time of the wire. Here each rank sleeps for the time that was measured on a core
of its own (step_pace.py). Gradients are the same in every step, and differ between ranks.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiring._bench.workers.step_case import Pace, StepCase
from multiring._bench.workers.step_models import NETWORKS
from multiring._bench.workers.step_task import LEARNING_RATE, MOMENTUM, StepTask

_LEAST_SLEEP_S = 50e-6  # the system would extend a shorter sleep


class _Arrival(torch.autograd.Function):
    """Does nothing in forward. In backward, it sleeps, and then returns a parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:  # noqa: ARG004 -- torch's
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None]:
        sleep(ctx.seconds)
        return gradients[0], ctx.gradient, None, None


class EmulatedNetwork(nn.Module):
    """A network with the parameters of `network`, whose forward is never called.

    `gradients` maps the parameters' names to their gradients.

    Raises:
        AssertionError: `pace` was measured on another network.
    """

    def __init__(self, network: nn.Module, gradients: dict[str, Tensor], pace: Pace) -> None:
        super().__init__()
        self.network = network
        self._parts = dict(network.named_parameters())
        self._gradients = gradients
        self._pace = pace
        if sorted(self._parts) != sorted(name for name, _ in pace.backward):
            raise AssertionError("the recorded times belong to another network")

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after the time of forward.

        Backward runs through the parameters in reverse, so that gradients come in the order of the pace.
        """
        sleep(self._pace.forward_s)
        for name, seconds in reversed(self._pace.backward):
            applied: Tensor = _Arrival.apply(x, self._parts[name], self._gradients[name], seconds)  # type: ignore[no-untyped-call]
            x = applied
        return x


class EmulatedOptimizer(torch.optim.SGD):
    """Takes real steps until `seconds` is set; then it sleeps instead."""

    seconds: float | None = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step, or sleep for the time of a step."""
        if self.seconds is None:
            loss: float | None = super().step(closure)
            return loss
        sleep(self.seconds)
        return None


class EmulatedTask(StepTask):
    """A StepTask whose times come from `case.pace`."""

    def __init__(self, case: StepCase, rank: int) -> None:
        self.case = case
        self.rank = rank
        self._pace = Pace.read(Path(case.pace))
        torch.manual_seed(0)
        network = NETWORKS[case.network].make()
        torch.manual_seed(1 + rank)
        gradients = {name: torch.randn(part.shape) for name, part in network.named_parameters()}
        self.model = EmulatedNetwork(network, gradients, self._pace)
        self._optimizers: list[EmulatedOptimizer] = []

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer that sleeps once the task is verified."""
        self._optimizers.append(EmulatedOptimizer(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM))
        return self._optimizers[-1]

    def backward(self, model: nn.Module) -> None:
        """Sleep for the time of forward and backward; each gradient arrives at its measured time."""
        model(torch.zeros(())).backward()

    def verified(self) -> None:
        """Make optimizers sleep from now on."""
        super().verified()
        for optimizer in self._optimizers:
            optimizer.seconds = self._pace.optimizer_s


def sleep(seconds: float) -> None:
    """Sleep, unless the time is too short for a sleep."""
    if seconds > _LEAST_SLEEP_S:
        time.sleep(seconds)
