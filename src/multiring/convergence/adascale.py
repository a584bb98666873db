"""AdaScale: the worth of a step with S times the batch, in small-batch steps.

    gain = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)        from 1 to S

mu^2 is the squared norm of the gradient's mean, sigma^2 its variance at the small batch. The learning rate of the small
batch is multiplied by the gain, and its schedule advances by the gain. If the gradient is pure noise, the gain is S, as
in linear scaling. Without noise it is 1. AdaScale therefore needs no warm-up.

Source: Johnson, Agrawal, Gu & Guestrin, "AdaScale SGD: a user-friendly algorithm for distributed training", ICML 2020,
arXiv 2007.05105.
"""

from collections.abc import Mapping
from typing import Any

from multiring.convergence.noise_scale import NoiseSample
from multiring.errors import ArgumentError


def adascale_gain(variance: float, square: float, scale: float) -> float:
    """Return the gain, from 1 to `scale`.

    Args:
        variance: sigma^2 of the small batch's gradient; a negative value counts as 0.
        square: mu^2; a negative value counts as 0.
        scale: S, the factor by which the batch is larger.
    """
    variance, square = max(variance, 0.0), max(square, 0.0)
    below = variance / scale + square
    return (variance + square) / below if below > 0 else 1.0


class AdaScale:
    """The gain, computed from moving averages over the last steps."""

    def __init__(self, scale: float, batch: float, memory: float | None = None) -> None:
        """Start with a gain of 1.

        Args:
            scale: S, the factor by which the training batch is larger than the small batch.
            batch: samples of the small batch.
            memory: weight of the old average at each step; by default max(1 - S/1000, 0).

        Raises:
            ArgumentError: a number is out of range.
        """
        if not scale >= 1 or not batch > 0:
            raise ArgumentError(f"AdaScale(scale={scale!r}, batch={batch!r}): want a scale >= 1 and a batch > 0")
        self._scale, self._batch = scale, batch
        self._memory = max(1.0 - scale / 1000.0, 0.0) if memory is None else memory
        if not 0 <= self._memory < 1:
            raise ArgumentError(f"AdaScale(memory={memory!r}): want 0 or more, and below 1")
        self._weight = self._variance = self._square = 0.0
        self.progress = 0.0  # in steps of the small batch

    @property
    def gain(self) -> float:
        """The gain of the next step, in steps of the small batch."""
        if not self._weight:
            return 1.0
        return adascale_gain(self._variance / self._weight, self._square / self._weight, self._scale)

    def add(self, sample: NoiseSample) -> None:
        """Add a step's noise sample to the averages."""
        keep = self._memory
        self._weight = keep * self._weight + (1 - keep)
        self._variance = keep * self._variance + (1 - keep) * sample.noise / self._batch
        self._square = keep * self._square + (1 - keep) * sample.signal

    def advance(self) -> float:
        """Count a step, and return its gain."""
        gain = self.gain
        self.progress += gain
        return gain

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the progress."""
        return {
            "weight": self._weight,
            "variance": self._variance,
            "square": self._square,
            "progress": self.progress,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages and the progress from `state`."""
        self._weight, self._variance = state["weight"], state["variance"]
        self._square, self.progress = state["square"], state["progress"]
