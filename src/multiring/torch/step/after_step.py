"""Stages after a step: schedules, AdaScale and moving averages of weights; and gradient clipping before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multiring._arguments import require_function, require_number, require_whole
from multiring.convergence.adascale import AdaScale
from multiring.convergence.rate_schedules import LearningRateSchedule
from multiring.torch.checkpoint.tensors import placed_as
from multiring.torch.parallelizing.held import as_spread, is_dtensor, local
from multiring.torch.step.gradients import norm_on_device, plain, scaled, square_of
from multiring.torch.step.noise import NoiseWatch
from multiring.torch.step.stages import StepContext, each_gradient, stages_of


class RateSchedule:
    """Set learning rates by the number of steps that had a gradient; see `schedule_learning_rate`."""

    name = "schedule"

    def __init__(self, optimizer: torch.optim.Optimizer, rule: LearningRateSchedule, adascale: AdaScale | None) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._adascale = adascale
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self.position = 0.0
        self._set()

    @property
    def gain(self) -> float:
        """AdaScale's gain for the next step; 1 without AdaScale."""
        return 1.0 if self._adascale is None else self._adascale.gain

    def before(self, step: StepContext) -> None:  # noqa: ARG002 -- as Stage
        """Set the learning rate of this step, because AdaScale's gain is known only now."""
        self._set()

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- as Stage
        """Advance the schedule, and set the learning rate of the next step."""
        if applied:
            self.position += 1.0 if self._adascale is None else self._adascale.advance()
            self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's position and the base learning rates."""
        return {"position": self.position, "bases": list(self._bases)}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:  # noqa: ARG002 -- as Stage
        """Restore the position and the base learning rates."""
        self.position, bases = state["position"], state["bases"]
        self._bases[: len(bases)] = bases
        self._set()

    def _set(self) -> None:
        groups = self._optimizer.param_groups
        self._bases += [float(group["lr"]) for group in groups[len(self._bases) :]]  # groups that were added since
        for group, base in zip(groups, self._bases, strict=False):
            group["lr"] = base * self._rule(self.position) * self.gain


def schedule_learning_rate(optimizer: torch.optim.Optimizer, rule: LearningRateSchedule) -> RateSchedule:
    """Scale the optimizer's learning rates by `rule` at each step.

        mt.schedule_learning_rate(optimizer, Warmup(500) * Cosine(10_000))

    The training loop needs no further call. Steps without a gradient do not count: the first step with gradient lag,
    and steps that overflowed. The schedule is saved with the optimizer's state. Parameter groups that are added later
    follow it, too.

    Args:
        optimizer: a plain or distributed optimizer. Call this after `distribute`, which may scale the learning rates.
        rule: a schedule of `multiring.convergence.rate_schedules`.

    Raises:
        ArgumentError: `rule` is no function.
    """
    require_function("schedule_learning_rate: rule", rule, "a function of the step")
    found = RateSchedule(optimizer, rule, None)
    stages_of(optimizer).add(found)
    return found


def adascale(
    optimizer: torch.optim.Optimizer, rule: LearningRateSchedule, noise: NoiseWatch, *, scale: float, batch: int
) -> RateSchedule:
    """Use a small batch's learning rate schedule for a larger batch, by AdaScale.

    Args:
        optimizer: SGD with the small batch's learning rate.
        rule: the small batch's schedule, in steps of the small batch; stop training when `position` reaches its end.
        noise: the result of `noise_scale(optimizer, every=1)`.
        scale: the large batch divided by the small batch (AdaScale's S).
        batch: the small batch, in samples.

    Raises:
        ArgumentError: `rule` is no function, `scale` is below 1, or `batch` is not a whole number from 1 on.

    Source: `multiring.convergence.adascale`.
    """
    require_function("adascale: rule", rule, "a function of the step")
    scale, batch = require_number("adascale: scale", scale, 1.0), require_whole("adascale: batch", batch, 1)
    found = RateSchedule(optimizer, rule, noise.begin_adascale(scale, batch))
    stages_of(optimizer).add(found)
    return found


class MovingAverage:
    """An exponential moving average of weights and of batch statistics; see `moving_average`."""

    name = "average"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._averages = [each.detach().clone() for each in self._followed()]

    def _followed(self) -> list[Tensor]:
        """Return this rank's parts of the model's current tensors.

        `model.half()` or a forward pass may replace the tensors, so this is called for each use.
        """
        numbers = [each for each in self._model.buffers() if each.is_floating_point() or each.is_complex()]
        return plain([*(each.detach() for each in self._model.parameters()), *numbers])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the model has the averages, for evaluation.

        Changes of the weights in the context change the averages.
        """
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
        """Do nothing."""

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- as Stage
        """Move the averages towards the current weights and statistics."""
        if applied:
            with torch.no_grad():
                torch._foreach_lerp_(self._averages, self._followed(), 1 - self._decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        likes = [*self._model.parameters()]
        return {"averages": [as_spread(each, likes[n : n + 1]) for n, each in enumerate(self._averages)]}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Restore the averages."""
        parameters = [*self._model.parameters()]
        for number, (own, kept) in enumerate(zip(self._averages, state["averages"], strict=True)):
            is_spread = number < len(parameters) and is_dtensor(parameters[number]) and not is_dtensor(kept)
            own.copy_(local(placed_as(kept, parameters[number]) if is_spread else kept))


def moving_average(optimizer: torch.optim.Optimizer, model: Any, decay: float = 0.999) -> MovingAverage:
    """Keep an exponential moving average of `model`'s weights.

    Each step that had a gradient updates the average. Floating-point and complex buffers, such as batch norm's running
    statistics, are averaged in the same way, because the statistics of the current weights do not fit averaged weights.
    Averages of buffers differ between ranks, as the buffers do. The averages are saved with the optimizer's state; a
    checkpoint has those of rank 0 for all ranks.

    Raises:
        ArgumentError: `decay` is not from 0 to 1.
    """
    decay = require_number("decay", decay, below=1.0)
    model = model if isinstance(model, nn.Module) else model.module  # this rank's part of a ParallelModel
    found = MovingAverage(model, decay)
    stages_of(optimizer).add(found)
    return found


class Clipping:
    """Clip gradients by their norm; see `clip_gradients`."""

    name = "clip"

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._norm: float | Tensor = 0.0

    @property
    def norm(self) -> float:
        """The norm of the last gradient, before clipping; on a device, reading it waits for the device."""
        return float(self._norm)

    def before(self, step: StepContext) -> None:
        """Scale the gradient down if its norm is above the limit."""
        norm = norm_on_device(step.parameters, step.gradients)
        if norm is not None:
            self._norm = norm
            each_gradient(step, lambda gradients: scaled(gradients, (self._limit / norm).clamp(max=1.0)))
            return
        self._norm = square_of(step.parameters, step.gradients) ** 0.5
        if self._norm > self._limit:
            factor = self._limit / self._norm
            each_gradient(step, lambda gradients: scaled(gradients, factor))

    def after(self, step: StepContext, *, applied: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: clipping has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Do nothing: clipping has no state."""


def clip_gradients(optimizer: torch.optim.Optimizer, limit: float) -> Clipping:
    """Clip the gradients of all parameters together to a norm of `limit`.

    Clipping works on reduced gradients, after the division by the loss scale. With gradient lag, it works on the
    gradient that the step applies.

    Raises:
        ArgumentError: `limit` is not above 0.
    """
    found = Clipping(require_number("limit", limit, above=True))
    stages_of(optimizer).add(found)
    return found
