"""The gradient noise scale: how large a batch may be before its gradient is hardly noisier than that of all data.

    noise scale = tr(Sigma) / |G|^2

G is the gradient of the loss over all data, Sigma the covariance of one sample's gradient. Neither is known, but a
step of several ranks has gradients of parts of a batch and of the whole, whose squared norms differ by noise alone.
With rank i's gradient g_i over b_i samples, p ranks, B = sum b_i and the whole batch's g = sum (b_i / B) g_i:

    E|g_i|^2 = |G|^2 + tr(Sigma) / b_i          E|g|^2 = |G|^2 + tr(Sigma) / B
    E sum (b_i / B) |g_i|^2 = |G|^2 + p tr(Sigma) / B

so that both follow, without bias and for uneven parts too. Each is averaged over steps, then they are divided: an
average of quotients would be biased, and often infinite.

Source: McCandlish, Kaplan, Amodei & the OpenAI Dota Team, "An empirical model of large-batch training", 2018,
arXiv 1812.06162, appendix A; here with parts of unlike sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

Series = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """What one step says; either may be negative, as only their means over many steps are what they stand for."""

    signal: float  # of |G|^2
    noise: float  # of tr(Sigma)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where it may lie; in samples. `high` is infinite where the data cannot tell it from that."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} ({self.low:,.0f} to {self.high:,.0f})"


def noise_sample(own: Sequence[float], samples: Sequence[float], whole: float) -> NoiseSample:
    """Return what a step says of the noise scale.

    Args:
        own: |g_i|^2 of each part, a rank's or a micro-batch's; of the mean over its samples.
        samples: b_i, how many each part has; parts of none do not count.
        whole: |g|^2 of the mean over all of them.

    Raises:
        ArgumentError: fewer than two parts have samples, or there are not as many norms as numbers.
    """
    parts = [(norm, count) for norm, count in zip(own, samples, strict=False) if count > 0]
    if len(own) != len(samples) or len(parts) < 2:
        raise ArgumentError(
            f"noise scale of {len(own)} squared norms of parts of {list(samples)} samples: want at least two parts "
            "with samples, and a norm for each; one rank takes two micro-batches for a step"
        )
    total = float(sum(count for _, count in parts))
    mean = sum(norm * count for norm, count in parts) / total
    return sample_of_means(mean, whole, total, len(parts))


def sample_of_means(mean: float, whole: float, total: float, parts: float) -> NoiseSample:
    """Return what a step says of the noise scale, where ranks have summed up what they know.

    Args:
        mean: of |g_i|^2 over the parts, weighted by their samples.
        whole: |g|^2.
        total: B.
        parts: p, those that have samples; more than 1.
    """
    noise = (mean - whole) * total / (parts - 1)
    return NoiseSample(signal=whole - noise / total, noise=noise)


class NoiseScale:
    """The noise scale of the last steps."""

    def __init__(self, window: int = 1000) -> None:
        """Know nothing yet; `window` is of how many steps an answer speaks.

        Raises:
            ArgumentError: `window` below 2.
        """
        if window < 2:
            raise ArgumentError(f"window={window}: want 2 steps or more")
        self._window = window
        self._signals: list[float] = []
        self._noises: list[float] = []

    def __len__(self) -> int:
        return len(self._signals)

    def add(self, sample: NoiseSample) -> None:
        """Count one step; one that is not finite, as of a loss scale that was too large, does not count."""
        if not (math.isfinite(sample.signal) and math.isfinite(sample.noise)):
            return
        self._signals.append(sample.signal)
        self._noises.append(sample.noise)
        del self._signals[: -self._window], self._noises[: -self._window]

    @property
    def value(self) -> float:
        """The noise scale, in samples; infinite where the gradient cannot be told from zero, NaN without steps."""
        if not self._signals:
            return math.nan
        return float(_quotient(np.mean(self._noises), np.mean(self._signals)))

    def interval(self, level: float = 0.95, *, resamples: int = 1000, seed: int = 0) -> Interval:
        """Return the noise scale with its block-bootstrap interval; see `block_bootstrap`."""
        if len(self) < 2:
            raise ArgumentError(f"interval of {len(self)} steps: want 2 or more")
        return block_bootstrap(
            np.array(self._noises), np.array(self._signals), level=level, resamples=resamples, seed=seed
        )

    def steps_needed(self, precision: float = 0.25) -> int:
        """Return how many more steps it takes until the interval's half width is about `precision` of the value.

        By what the steps so far say: its width falls as one over the root of their number. 0 where it is narrow enough;
        -1 where there are too few steps to say, or the gradient cannot be told from zero.
        """
        if len(self) < 8:
            return -1
        found = self.interval()
        if not math.isfinite(found.high) or not found.value > 0:
            return -1
        width = (found.high - found.low) / 2 / found.value
        return max(0, math.ceil(len(self) * ((width / precision) ** 2 - 1)))

    def progress_mean(self, batch: float, blocks: int = 16) -> float:
        """Return the critical batch of a whole run, of which all steps were counted, at batch size `batch`.

        The noise scale grows while a model trains. A step at batch B makes 1 / (1 + noise/B) of the progress that a
        step without noise makes; over that progress the noise scale is averaged: Emin / Smin of the run. The steps are
        cut into `blocks`, within each of which both parts are averaged.

        Source: McCandlish et al. 2018, appendix D, for a constant batch.
        """
        blocks = min(blocks, max(1, len(self) // 4))
        noises = np.array([np.mean(each) for each in np.array_split(self._noises, blocks)])
        signals = np.array([np.mean(each) for each in np.array_split(self._signals, blocks)])
        weights = np.array([len(each) for each in np.array_split(self._noises, blocks)], float)
        # noise/(1 + noise/signal/B) and 1/(1 + ...), each times signal: nothing is divided by what may be zero.
        noises, signals = np.maximum(noises, 0.0), np.maximum(signals, 0.0)
        whole = signals + noises / batch
        progress = weights * np.divide(signals, whole, out=np.zeros_like(signals), where=whole > 0)
        samples = weights * np.divide(noises, whole, out=np.zeros_like(signals), where=whole > 0)
        return float(_quotient(samples.sum(), progress.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Return what it knows."""
        return {"window": self._window, "signals": list(self._signals), "noises": list(self._noises)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what `state_dict` returned."""
        self._window = int(state["window"])
        self._signals, self._noises = list(state["signals"]), list(state["noises"])


def block_bootstrap(
    noises: Series, signals: Series, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Return mean(noises) / mean(signals) with its percentile interval over resampled blocks of steps.

    Steps that follow each other are alike, so blocks of n^(1/3) neighbouring steps are drawn, in a circle.

    Args:
        noises: shape (n,).
        signals: shape (n,).
        level: of the interval.
        resamples: how many.
        seed: of the draws.

    Source: Politis & Romano, "A circular block-resampling procedure for stationary data", 1992; the length after
    Hall, Horowitz & Jing, "On blocking rules for the bootstrap with dependent data", Biometrika 82, 1995.
    """
    count = len(noises)
    length = max(1, round(count ** (1 / 3)))
    blocks = -(-count // length)
    starts = np.random.default_rng(seed).integers(0, count, (resamples, blocks))
    # Sums over a block from cumulative ones: the resampled steps themselves are never laid out.
    sums = []
    for series in (noises, signals):
        around = np.concatenate([[0.0], np.cumsum(np.concatenate([series, series[:length]]))])
        sums.append((around[starts + length] - around[starts]).sum(axis=1))
    found = _quotient(sums[0], sums[1])
    # By the lower of two neighbours: there is nothing between a number and infinity.
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], method="lower")
    return Interval(float(_quotient(noises.mean(), signals.mean())), float(low), float(high))


def _quotient(noise: Any, signal: Any) -> Any:
    """Return noise / signal; 0 where there is no noise, infinity where there is no signal."""
    noise, signal = np.maximum(noise, 0.0), np.asarray(signal, float)
    found = np.divide(noise, signal, out=np.full(np.shape(signal), np.inf), where=signal > 0)
    return np.where(noise > 0, found, 0.0)
