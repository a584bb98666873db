"""Turn a run's options into an optimizer, its schedule, and the stages around its steps."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import multiring.torch as mt
from multiring._arguments import require_whole
from multiring.convergence import Cosine, LearningRateSchedule, Polynomial
from multiring.torch.step.after_step import MovingAverage
from multiring.torch.step.lag import GradientLag
from multiring.torch.step.noise import NoiseWatch
from multiring.torch.step.precision import MixedPrecision
from multiring.torch.step.stages import StepContext, stages_of
from multiring.training.options import TrainingOptions

NOISE_EVERY = 20  # steps between two measurements of the noise scale


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """The optimizer, and the stages around its steps.

    Attributes:
        optimizer: takes the steps; its stages also unscale, clip, delay and average.
        precision: `autocast()` and `backward(loss)` for the options' precision.
        lag: the delay of gradients; `flush()` applies the last one.
        average: the moving average of weights, or None.
        noise: the measurement of the gradient noise scale, or None.
    """

    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    lag: GradientLag
    average: MovingAverage | None
    noise: NoiseWatch | None


class _KeptNoise:
    """A stage that measures no noise scale, but keeps the measurements of a checkpoint for the next checkpoint.

    A run may resume on a number of ranks that cannot measure, and later again on one that can.
    """

    name = "noise"

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def before(self, step: StepContext) -> None:
        """Do nothing."""

    def after(self, step: StepContext, *, applied: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loaded state, or {}."""
        return self._state

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:  # noqa: ARG002 -- as Stage
        """Keep a state of `NoiseWatch`."""
        self._state = state


def steps_per_epoch(samples: int, batch: int) -> int:
    """Return the number of steps of an epoch; the last step may have fewer samples.

    Raises:
        ArgumentError: `samples` is not a whole number from 0 on, or `batch` not one from 1 on.
    """
    return -(-require_whole("samples", samples) // require_whole("batch", batch, 1))


@dataclass(frozen=True)
class _WarmThen(LearningRateSchedule):
    """A schedule that rises linearly from 0 to 1 in `steps` steps, and then follows another schedule."""

    steps: int
    then: LearningRateSchedule

    def __call__(self, step: float) -> float:
        """Return the learning rate at `step`, relative to the highest rate."""
        return step / self.steps if step < self.steps else self.then(step - self.steps)


def learning_rate_schedule(options: TrainingOptions, steps: int) -> LearningRateSchedule:
    """Return the learning rate over the run, relative to the highest rate: linear warm-up, then the decay.

    Args:
        options: the options of the run.
        steps: the number of steps of an epoch.

    Raises:
        ArgumentError: `steps` is not a whole number from 1 on.
    """
    steps = require_whole("steps", steps, 1)
    warm = round(options.warmup * steps)
    left = max(1, options.epochs * steps - warm)
    end = options.end_rate / options.rate
    decay: LearningRateSchedule = Cosine(left, end) if options.decay == "cosine" else Polynomial(left, 2.0, end)
    return _WarmThen(warm, decay)


def build_optimizer(options: TrainingOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; biases and norms have no weight decay and no trust ratio."""
    name, rate, decay = options.optimizer, options.rate, options.weight_decay
    has_ratio = name in {"lars", "larc", "larc-adam", "lamb"}
    groups: Any = mt.parameter_groups(model, weight_decay=decay, trust_ratio=has_ratio)
    if name in {"sgd", "larc"}:
        made: torch.optim.Optimizer = torch.optim.SGD(groups, lr=rate, momentum=options.momentum)
    elif name in {"adamw", "larc-adam"}:
        made = torch.optim.AdamW(groups, lr=rate)
    elif name == "lars":
        made = mt.LARS(groups, lr=rate, momentum=options.momentum, trust_coefficient=options.trust)
    else:
        made = mt.LAMB(groups, lr=rate)
    return mt.LARC(made, trust_coefficient=options.trust) if name.startswith("larc") else made


def build_recipe(options: TrainingOptions, model: nn.Module, steps: int, passes: int) -> TrainingRecipe:
    """Return everything that the loop steps with, over all ranks unless `options.plain` is set.

    Args:
        options: the options of the run.
        model: the model; it is the same on every rank.
        steps: the number of steps of an epoch.
        passes: the number of backward passes in a step.

    Raises:
        ArgumentError: `steps` or `passes` is not a whole number from 1 on.
    """
    steps, passes = require_whole("steps", steps, 1), require_whole("passes", passes, 1)
    optimizer = build_optimizer(options, model)
    if not options.plain:
        # Each rank's loss is a sum over its samples, divided by the number of all ranks' samples: together, the mean.
        optimizer = mt.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=options.wire or "none",
            error_feedback=options.wire == "int8",
            backward_passes_per_step=passes,
            op=mt.Sum,
        )
    # The stages sort themselves: unscale, check, measure the noise, clip, delay, step, average, schedule.
    precision = mt.mixed_precision(optimizer, "bf16" if options.precision == "bf16" else "float32")
    if options.clip:
        mt.clip_gradients(optimizer, options.clip)
    lag = mt.gradient_lag(optimizer, options.lag)
    average = mt.moving_average(optimizer, model, options.ema) if options.ema else None
    noise = None
    if options.noise and not options.plain and mt.size() > 1 and options.batch % mt.size() == 0:
        noise = mt.noise_scale(optimizer, samples=options.batch // mt.size(), every=NOISE_EVERY)
    else:
        stages_of(optimizer).add(_KeptNoise())
    mt.schedule_learning_rate(optimizer, learning_rate_schedule(options, steps))
    return TrainingRecipe(optimizer=optimizer, precision=precision, lag=lag, average=average, noise=noise)
