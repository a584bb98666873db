"""Schedules of the learning rate and the batch size, for any framework.

A schedule is a function of the step, which may be fractional. It returns the factor of the initial learning rate.
torch's LambdaLR, optax's scale_by_schedule and multiring's own schedules accept such functions. Schedules can be
multiplied: `Warmup(5) * Cosine(90)`.

Sources: Goyal et al., "Accurate, large minibatch SGD", 2017, arXiv 1706.02677 (linear scaling, warm-up); Krizhevsky,
"One weird trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997 (square root); Loshchilov &
Hutter, "SGDR", ICLR 2017, arXiv 1608.03983 (cosine); Smith et al., "Don't decay the learning rate, increase the batch
size", ICLR 2018, arXiv 1711.00489.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiring._arguments import require_choice, require_number, require_whole, shown
from multiring.errors import ArgumentError


class LearningRateSchedule:
    """The factor of the learning rate at each step."""

    def __call__(self, step: float) -> float:
        """Return the factor at `step`, which is 0 or more."""
        raise NotImplementedError

    def __mul__(self, other: "LearningRateSchedule") -> "LearningRateSchedule":
        """Return the product of two schedules."""
        return Product((self, other))


@dataclass(frozen=True)
class Product(LearningRateSchedule):
    """The product of several schedules."""

    parts: tuple[LearningRateSchedule, ...]

    def __call__(self, step: float) -> float:
        """Return the product of the parts' factors."""
        return math.prod(part(step) for part in self.parts)


@dataclass(frozen=True)
class Constant(LearningRateSchedule):
    """A constant factor."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        require_number("Constant factor", self.factor, -math.inf)

    def __call__(self, step: float) -> float:  # noqa: ARG002 -- the signature of LearningRateSchedule
        """Return the constant factor."""
        return self.factor


@dataclass(frozen=True)
class Warmup(LearningRateSchedule):
    """A linear rise from `start` to 1 in `steps` steps."""

    steps: float
    start: float = 0.0

    def __post_init__(self) -> None:
        require_number("Warmup steps", self.steps)
        require_number("Warmup start", self.start)

    def __call__(self, step: float) -> float:
        """Return the factor; 1 after the last step of the warm-up."""
        return 1.0 if step >= self.steps else self.start + (1.0 - self.start) * step / self.steps


@dataclass(frozen=True)
class Polynomial(LearningRateSchedule):
    """A fall from 1 to `end` in `steps` steps, as (1 - step/steps)^power."""

    steps: float
    power: float = 2.0
    end: float = 0.0

    def __post_init__(self) -> None:
        require_number("Polynomial steps", self.steps, above=True)
        require_number("Polynomial power", self.power)
        require_number("Polynomial end", self.end, -math.inf)

    def __call__(self, step: float) -> float:
        """Return the factor; `end` after `steps` steps."""
        left = max(0.0, 1.0 - step / self.steps)
        return float(self.end + (1.0 - self.end) * left**self.power)


@dataclass(frozen=True)
class Cosine(LearningRateSchedule):
    """A fall from 1 to `end` in `steps` steps along half a cosine."""

    steps: float
    end: float = 0.0

    def __post_init__(self) -> None:
        require_number("Cosine steps", self.steps, above=True)
        require_number("Cosine end", self.end, -math.inf)

    def __call__(self, step: float) -> float:
        """Return the factor; `end` after `steps` steps."""
        part = min(1.0, step / self.steps)
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * part))


@dataclass(frozen=True)
class Steps(LearningRateSchedule):
    """A multiplication by `factor` at each step in `at`."""

    at: tuple[float, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        _require_steps("Steps at", self.at)
        require_number("Steps factor", self.factor)

    def __call__(self, step: float) -> float:
        """Return the factor."""
        return float(self.factor ** sum(step >= each for each in self.at))


@dataclass(frozen=True)
class GrowingBatch:
    """A batch size that grows where `Steps` would lower the learning rate.

    Once the batch has reached its limit, the learning rate falls instead.

    Args:
        batch: the first batch size.
        at: the steps at which the batch grows, counted in samples divided by the first batch size.
        factor: the factor of the learning rate in `Steps`, below 1; the batch is divided by it instead.
        most: the largest batch size.
    """

    batch: int
    at: tuple[float, ...]
    factor: float = 0.1
    most: int = 2**62

    def __post_init__(self) -> None:
        for name in ("batch", "most"):
            require_whole(f"GrowingBatch {name}", getattr(self, name), 1)
        _require_steps("GrowingBatch at", self.at)
        require_number("GrowingBatch factor", self.factor, below=1.0)
        if self.most < self.batch or self.factor == 0:
            raise ArgumentError(f"{self}: want a batch of 1 or more, at most `most`, and a factor between 0 and 1")

    def at_step(self, step: float) -> tuple[int, float]:
        """Return the batch size at `step`, and the factor of the learning rate."""
        wanted = self.factor ** -sum(step >= each for each in self.at)
        batch = min(self.most, round(self.batch * wanted))
        return batch, batch / (self.batch * wanted)


def scaled_rate(rate: float, batch: float, to: float, rule: str = "linear") -> float:
    """Return the learning rate for `to` samples, given `rate` for `batch` samples.

    Args:
        rate: the known learning rate.
        batch: its batch size, in samples.
        to: the new batch size, in samples.
        rule: "linear", for SGD far below the critical batch, or "sqrt", as is usual for Adam.

    Raises:
        ArgumentError: the rule is unknown, or a batch size is not above 0.
    """
    require_choice("rule", rule, ("linear", "sqrt"))
    rate = require_number("scaled_rate: rate", rate)
    batch = require_number("scaled_rate: batch", batch, above=True)
    to = require_number("scaled_rate: to", to, above=True)
    return rate * (to / batch if rule == "linear" else math.sqrt(to / batch))


def advanced(schedule: LearningRateSchedule, gains: Sequence[float]) -> list[float]:
    """Return the factors of steps that advance `schedule` by `gains`, as in AdaScale."""
    found, at = [], 0.0
    for gain in gains:
        found.append(schedule(at))
        at += gain
    return found


def _require_steps(what: str, at: Any) -> None:
    if not isinstance(at, Sequence) or isinstance(at, str):
        raise ArgumentError(f"{what}={shown(at)}: want a list of steps")
    for each in at:
        require_number(what, each)
