"""What follows a step that had a gradient: schedules, AdaScale, averages of weights; and clipping, before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multiring.convergence.adascale import AdaScale
from multiring.convergence.arguments import require_number
from multiring.convergence.rate_schedules import Schedule
from multiring.errors import ArgumentError
from multiring.torch.checkpoint.tensors import placed_as
from multiring.torch.parallelizing.held import as_spread, is_dtensor, local
from multiring.torch.step.gradients import plain, scaled, square_of
from multiring.torch.step.noise import NoiseWatch
from multiring.torch.step.stages import StepContext, each_gradient, stages_of


class RateSchedule:
    """Sets learning rates by how many steps had a gradient; see `schedule`."""

    name = "schedule"

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Schedule, adascale: AdaScale | None) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._adascale = adascale
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.position = 0.0
        self._set()

    @property
    def gain(self) -> float:
        """AdaScale's, of the next step; 1 without it."""
        return 1.0 if self._adascale is None else self._adascale.gain

    def before(self, step: StepContext) -> None:  # noqa: ARG002 -- as Stage
        """Set the rate of this step; AdaScale's gain is known now."""
        self._set()

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- as Stage
        """Advance, and set the rate of the next step."""
        if applied:
            self.position += 1.0 if self._adascale is None else self._adascale.advance()
            self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"position": self.position, "bases": list(self._bases)}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:  # noqa: ARG002 -- as Stage
        """Go on from there."""
        self.position, self._bases = state["position"], list(state["bases"])
        self._set()

    def _set(self) -> None:
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=False):
            group["lr"] = base * self._rule(self.position) * self.gain


def schedule(optimizer: torch.optim.Optimizer, rule: Schedule) -> RateSchedule:
    """Let the learning rates follow `rule`, from what they are now; nothing has to be called in the loop.

        mt.schedule(optimizer, Warmup(500) * Cosine(10_000))

    Steps without a gradient, as the first one with lag or one that overflowed, do not count. It is saved with the
    optimizer's state.

    Args:
        optimizer: any, plain or distributed; after `distribute`, which may scale its rates.
        rule: of `multiring.convergence.rate_schedules`.
    """
    found = RateSchedule(optimizer, rule, None)
    stages_of(optimizer).add(found)
    return found


def adascale(
    optimizer: torch.optim.Optimizer, rule: Schedule, noise: NoiseWatch, *, scale: float, batch: int
) -> RateSchedule:
    """Train by AdaScale: the rates, and the schedule, of a small batch, for one that is `scale` times larger.

    Args:
        optimizer: SGD with the small batch's learning rate.
        rule: the small batch's schedule, in its steps; training ends where `position` reaches its end.
        noise: `noise_scale(optimizer, every=1)`.
        scale: S.
        batch: the small batch, in samples.

    Source: `multiring.convergence.adascale`.
    """
    found = RateSchedule(optimizer, rule, noise.begin_adascale(scale, batch))
    stages_of(optimizer).add(found)
    return found


class MovingAverage:
    """An exponential average of weights and of batch statistics; see `moving_average`."""

    name = "average"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._averages = [each.detach().clone() for each in self._followed()]

    def _followed(self) -> list[Tensor]:
        """Return this rank's parts of the model's tensors, as they are now.

        `model.half()`, or a forward, may put others in their places.
        """
        numbers = [each for each in self._model.buffers() if each.is_floating_point() or each.is_complex()]
        return plain([*(each.detach() for each in self._model.parameters()), *numbers])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the averages, as for evaluation; what is changed there, the averages keep."""
        followed = self._followed()
        now = [each.detach().clone() for each in followed]
        with torch.no_grad():
            torch._foreach_copy_(followed, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._averages, followed)
                torch._foreach_copy_(followed, now)

    def before(self, step: StepContext) -> None:
        """There is nothing to do."""

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- as Stage
        """Move towards the weights, and the statistics."""
        if applied:
            with torch.no_grad():
                torch._foreach_lerp_(self._averages, self._followed(), 1 - self._decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        likes = [*self._model.parameters()]
        return {"averages": [as_spread(each, likes[n : n + 1]) for n, each in enumerate(self._averages)]}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Go on from there."""
        parameters = [*self._model.parameters()]
        for number, (own, kept) in enumerate(zip(self._averages, state["averages"], strict=True)):
            is_spread = number < len(parameters) and is_dtensor(parameters[number]) and not is_dtensor(kept)
            own.copy_(local(placed_as(kept, parameters[number]) if is_spread else kept))


def moving_average(optimizer: torch.optim.Optimizer, model: Any, decay: float = 0.999) -> MovingAverage:
    """Keep an exponential moving average of `model`'s weights, which moves with each step that had a gradient.

    Running statistics of batch norms, and all other buffers of numbers with a fraction, are averaged alike: those of
    today's weights do not fit an average. They are a rank's own, as the model's are. It is saved with the optimizer's
    state, rank 0's for all.

    Raises:
        ArgumentError: `decay` is not from 0 to 1.
    """
    require_number("decay", decay, below=1.0)
    model = model if isinstance(model, nn.Module) else model.module  # what this rank holds of a ParallelModel
    found = MovingAverage(model, decay)
    stages_of(optimizer).add(found)
    return found


class Clipping:
    """Shortens long gradients; see `clip_gradients`."""

    name = "clip"

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.norm = 0.0  # of the last gradient, before

    def before(self, step: StepContext) -> None:
        """Shorten the gradient."""
        self.norm = square_of(step.parameters, step.gradients) ** 0.5
        if self.norm > self._limit:
            factor = self._limit / self.norm
            each_gradient(step, lambda gradients: scaled(gradients, factor))

    def after(self, step: StepContext, *, applied: bool) -> None:
        """There is nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """There is nothing to keep."""


def clip_gradients(optimizer: torch.optim.Optimizer, limit: float) -> Clipping:
    """Shorten gradients, all parameters' together, to a norm of `limit`; after they are unscaled, before they wait.

    Raises:
        ArgumentError: `limit` is not above 0.
    """
    require_number("limit", limit)
    if not limit:
        raise ArgumentError("clip_gradients(limit=0): want a number above 0")
    found = Clipping(limit)
    stages_of(optimizer).add(found)
    return found
