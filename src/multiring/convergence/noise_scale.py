"""The gradient noise scale: the batch size from which noise hardly falls further.

    noise scale = tr(Sigma) / |G|^2

G is the gradient of the loss over all data, Sigma the covariance of one sample's gradient. Neither is known. A step of
several ranks computes the gradients of parts of a batch and of the whole batch. The squared norms of these gradients
differ by noise alone. With rank i's gradient g_i over b_i samples, p ranks, B = sum b_i and the whole batch's g = sum
(b_i / B) g_i:

    E|g_i|^2 = |G|^2 + tr(Sigma) / b_i          E|g|^2 = |G|^2 + tr(Sigma) / B
    E sum (b_i / B) |g_i|^2 = |G|^2 + p tr(Sigma) / B

Both unknowns follow from these equations, without bias and for parts of different sizes. Each is averaged over steps
before they are divided, because an average of quotients would be biased, and often infinite.

Source: McCandlish, Kaplan, Amodei & the OpenAI Dota Team, "An empirical model of large-batch training", 2018,
arXiv 1812.06162, appendix A; generalised here to parts of different sizes.
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
    """Estimates from one step.

    Either may be negative, because only means over many steps are meaningful.
    """

    signal: float  # estimate of |G|^2
    noise: float  # estimate of tr(Sigma)


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A value and its confidence interval, in samples.

    `high` is infinite if the data gives no upper limit.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} ({self.low:,.0f} to {self.high:,.0f})"


def noise_sample(own: Sequence[float], samples: Sequence[float], whole: float) -> NoiseSample:
    """Return one step's estimates for the noise scale.

    Args:
        own: |g_i|^2 of each part (a rank or a micro-batch), where g_i is the mean over the part's samples.
        samples: b_i, the number of samples of each part. Parts without samples are ignored.
        whole: |g|^2, where g is the mean over all samples.

    Raises:
        ArgumentError: fewer than two parts have samples, or `own` and `samples` differ in length.
    """
    parts = [(norm, count) for norm, count in zip(own, samples, strict=False) if count > 0]
    if len(own) != len(samples) or len(parts) < 2:
        raise ArgumentError(
            f"noise scale of {len(own)} squared norms and {list(samples)} samples: want at least two parts with "
            "samples, and one norm for each part; a single rank needs two micro-batches per step"
        )
    total = float(sum(count for _, count in parts))
    mean = sum(norm * count for norm, count in parts) / total
    return sample_of_means(mean, whole, total, len(parts))


def sample_of_means(mean: float, whole: float, total: float, parts: float) -> NoiseSample:
    """Return one step's estimates for the noise scale from sums over the ranks.

    Args:
        mean: the mean of |g_i|^2 over the parts, weighted by their samples.
        whole: |g|^2.
        total: B, the number of samples of all parts.
        parts: p, the number of parts that have samples; more than 1.
    """
    noise = (mean - whole) * total / (parts - 1)
    return NoiseSample(signal=whole - noise / total, noise=noise)


class NoiseScale:
    """The noise scale over the last steps."""

    def __init__(self, window: int = 1000) -> None:
        """Create an estimate without any steps.

        Args:
            window: number of the latest steps that count.

        Raises:
            ArgumentError: `window` is below 2.
        """
        if window < 2:
            raise ArgumentError(f"window={window}: want 2 steps or more")
        self._window = window
        self._signals: list[float] = []
        self._noises: list[float] = []

    def __len__(self) -> int:
        return len(self._signals)

    def add(self, sample: NoiseSample) -> None:
        """Count one step.

        A sample that is not finite, for example after an overflow, is ignored.
        """
        if not (math.isfinite(sample.signal) and math.isfinite(sample.noise)):
            return
        self._signals.append(sample.signal)
        self._noises.append(sample.noise)
        del self._signals[: -self._window], self._noises[: -self._window]

    @property
    def value(self) -> float:
        """The noise scale in samples.

        It is infinite if the gradient cannot be distinguished from zero, and NaN without steps.
        """
        if not self._signals:
            return math.nan
        return float(_quotient(np.mean(self._noises), np.mean(self._signals)))

    def interval(self, level: float = 0.95, *, resamples: int = 1000, seed: int = 0) -> ConfidenceInterval:
        """Return the noise scale with its interval by `block_bootstrap`."""
        if len(self) < 2:
            raise ArgumentError(f"interval of {len(self)} steps: want 2 or more")
        return block_bootstrap(
            np.array(self._noises), np.array(self._signals), level=level, resamples=resamples, seed=seed
        )

    def steps_needed(self, precision: float = 0.25) -> int:
        """Return the number of further steps that reach a relative precision.

        The precision is the interval's half width, as a share of the value. The estimate assumes that the width falls
        as one over the square root of the number of steps. The result is 0 if the interval is narrow enough already.
        The result is -1 if there are too few steps for an estimate, or if the gradient cannot be distinguished from
        zero.
        """
        if len(self) < 8:
            return -1
        found = self.interval()
        if not math.isfinite(found.high) or not found.value > 0:
            return -1
        width = (found.high - found.low) / 2 / found.value
        return max(0, math.ceil(len(self) * ((width / precision) ** 2 - 1)))

    def progress_mean(self, batch: float, blocks: int = 16) -> float:
        """Return the critical batch Emin / Smin of a run at batch size `batch`.

        All steps of the run must have been counted. The noise scale grows while a model trains. A step at batch B makes
        1 / (1 + noise/B) of the progress of a step without noise. The noise scale is averaged over that progress. For
        this, the steps are cut into `blocks`, and both estimates are averaged within each block.

        Source: McCandlish et al. 2018, appendix D, for a constant batch.
        """
        blocks = min(blocks, max(1, len(self) // 4))
        noises = np.array([np.mean(each) for each in np.array_split(self._noises, blocks)])
        signals = np.array([np.mean(each) for each in np.array_split(self._signals, blocks)])
        weights = np.array([len(each) for each in np.array_split(self._noises, blocks)], float)
        # noise/(1 + noise/signal/B) and 1/(1 + ...) are multiplied by signal, so that no division by zero occurs.
        noises, signals = np.maximum(noises, 0.0), np.maximum(signals, 0.0)
        whole = signals + noises / batch
        progress = weights * np.divide(signals, whole, out=np.zeros_like(signals), where=whole > 0)
        samples = weights * np.divide(noises, whole, out=np.zeros_like(signals), where=whole > 0)
        return float(_quotient(samples.sum(), progress.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the estimates of its steps."""
        return {"window": self._window, "signals": list(self._signals), "noises": list(self._noises)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window and the estimates from `state`."""
        self._window = int(state["window"])
        self._signals, self._noises = list(state["signals"]), list(state["noises"])


def block_bootstrap(
    noises: Series, signals: Series, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> ConfidenceInterval:
    """Return mean(noises) / mean(signals) with its interval over resampled blocks.

    Consecutive steps are correlated, so blocks of n^(1/3) consecutive steps are drawn; the last step is followed by the
    first.

    Args:
        noises: shape (n,).
        signals: shape (n,).
        level: confidence level of the interval.
        resamples: number of resamples.
        seed: seed of the random draws.

    Source: Politis & Romano, "A circular block-resampling procedure for stationary data", 1992; the length after
    Hall, Horowitz & Jing, "On blocking rules for the bootstrap with dependent data", Biometrika 82, 1995.
    """
    count = len(noises)
    length = max(1, round(count ** (1 / 3)))
    blocks = -(-count // length)
    starts = np.random.default_rng(seed).integers(0, count, (resamples, blocks))
    # Sums over blocks come from cumulative sums, so the resampled steps need no memory.
    sums = []
    for series in (noises, signals):
        around = np.concatenate([[0.0], np.cumsum(np.concatenate([series, series[:length]]))])
        sums.append((around[starts + length] - around[starts]).sum(axis=1))
    found = _quotient(sums[0], sums[1])
    # The quantile takes the lower neighbour, because a number and infinity cannot be interpolated.
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], method="lower")
    return ConfidenceInterval(float(_quotient(noises.mean(), signals.mean())), float(low), float(high))


def _quotient(noise: Any, signal: Any) -> Any:
    """Return noise / signal; 0 without noise, infinite without signal."""
    noise, signal = np.maximum(noise, 0.0), np.asarray(signal, float)
    found = np.divide(noise, signal, out=np.full(np.shape(signal), np.inf), where=signal > 0)
    return np.where(noise > 0, found, 0.0)
