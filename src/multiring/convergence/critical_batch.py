"""The cost of a batch size: the law of large-batch training, its fit, and advice.

    E = Emin (1 + B / Bc)        samples to a target, at batch B
    S = Smin (1 + Bc / B)        steps to the target; E = B S, Emin = Bc Smin
    rate = rate_max / (1 + Bc / B)        the best learning rate of SGD

Far below Bc, twice the batch halves the steps, and needs the same number of samples. Far above Bc, twice the batch
doubles the samples, and needs the same number of steps. At Bc, both are twice their minimum.

Source: McCandlish et al., "An empirical model of large-batch training", 2018, arXiv 1812.06162.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from multiring.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Law:
    """The law E = least (1 + (B / critical)^exponent).

    Args:
        least: Emin, in samples, epochs or any other unit of E.
        critical: Bc, in samples.
        exponent: 1 in the law; other values are for comparison.
    """

    least: float
    critical: float
    exponent: float = 1.0

    def needed(self, batch: float) -> float:
        """Return E at `batch`."""
        return float(self.least * (1.0 + (batch / self.critical) ** self.exponent))

    def residuals(self, batches: Sequence[float], needed: Sequence[float]) -> list[float]:
        """Return the relative deviation of each of `needed`, positive above the law."""
        return [each / self.needed(batch) - 1.0 for batch, each in zip(batches, needed, strict=True)]


def fit_critical_batch_size(batches: Sequence[float], needed: Sequence[float], exponent: float = 1.0) -> Law:
    """Return the law that fits `needed` best, by least squares of logarithms.

    Args:
        batches: three or more batch sizes, above 0.
        needed: E at each batch size, above 0.
        exponent: the exponent of B.

    Raises:
        ArgumentError: there are fewer than three batches, or a number is not above 0.
    """
    sizes, logs = np.asarray(batches, float), np.log(np.asarray(needed, float))
    if len(sizes) < 3 or len(sizes) != len(logs) or not (sizes > 0).all() or not np.isfinite(logs).all():
        raise ArgumentError(
            f"law of batches {list(batches)} and {list(needed)}: want three or more of each, all above 0"
        )
    low, high = math.log(sizes.min()) - 12.0, math.log(sizes.max()) + 12.0
    # For each Bc, the best Emin is the mean difference of logarithms. The loop refines a grid of Bc.
    for _ in range(8):
        grid = np.linspace(low, high, 65)
        shapes = np.log1p(np.exp(exponent * (np.log(sizes)[None, :] - grid[:, None])))
        differences = logs[None, :] - shapes
        errors = differences.var(axis=1)
        best = int(errors.argmin())
        spacing = grid[1] - grid[0]
        low, high = grid[best] - spacing, grid[best] + spacing
    return Law(float(np.exp(differences[best].mean())), float(np.exp(grid[best])), exponent)


@dataclass(frozen=True, slots=True)
class Choice:
    """The cost of one batch size, relative to the batch size of the known run."""

    batch: int
    steps: float  # relative to the known run's steps
    samples: float  # relative to the known run's samples
    learning_rate: float | None  # for SGD only
    total_steps: float | None  # None unless the known run's steps were given
    epochs: float | None  # None unless the known run's steps and samples per epoch were given

    def __str__(self) -> str:
        text = f"batch {self.batch:>8,}: {self.steps:6.2f} x the steps, {self.samples:6.2f} x the samples"
        text += "" if self.learning_rate is None else f", learning rate {self.learning_rate:.3g}"
        text += "" if self.total_steps is None else f", {self.total_steps:,.0f} steps"
        return text + ("" if self.epochs is None else f", {self.epochs:.1f} epochs")


@dataclass(frozen=True, slots=True)
class Advice:
    """The largest batch that pays, and the costs of other batches.

    Attributes:
        critical: Bc, in samples.
        pays_up_to: Bc, rounded. Doubling the batch up to this size saves at least a third of the steps.
        choices: other batches.
    """

    critical: float
    pays_up_to: int
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        head = f"critical batch {self.critical:,.0f}: a batch pays up to about {self.pays_up_to:,}"
        return "\n".join([head, *map(str, self.choices)])


def recommend_batch_size(  # noqa: PLR0913 -- the numbers that describe a run
    *,
    critical: float,
    batch: int,
    learning_rate: float | None = None,
    optimizer: str = "sgd",
    steps: float | None = None,
    samples_per_epoch: int | None = None,
    batches: Sequence[int] | None = None,
) -> Advice:
    """Return the largest batch that pays, and the steps and samples of others.

    Args:
        critical: Bc in samples, from a fit or from the noise scale averaged over a run (`NoiseScale.progress_mean`).
        batch: batch size of a known run.
        learning_rate: the best learning rate for `batch`. With "sgd", it determines the learning rates of other
        batches.
        optimizer: "sgd" or another name; the law gives learning rates only for SGD.
        steps: steps of the known run to its target. With it, the result contains the steps of other batches.
        samples_per_epoch: with it, and with `steps`, the result contains epochs.
        batches: batch sizes to advise on; by default from a quarter to 16 times `batch`.

    Raises:
        ArgumentError: a number is not above 0.
    """
    given = {"critical": critical, "batch": batch, "learning_rate": learning_rate, "steps": steps}
    given |= {"samples_per_epoch": samples_per_epoch}
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ArgumentError(f"recommend_batch_size({name}={value!r}): want a finite number above 0")
    chosen = tuple(batches) if batches is not None else tuple(max(1, batch << k >> 2) for k in range(7))
    if not chosen or min(chosen) < 1:
        raise ArgumentError(f"recommend_batch_size(batches={chosen!r}): want batches of 1 or more")
    own = 1.0 + critical / batch
    choices = []
    for each in chosen:
        part = (1.0 + critical / each) / own
        total = None if steps is None else steps * part
        choices.append(
            Choice(
                batch=each,
                steps=part,
                samples=part * each / batch,
                learning_rate=learning_rate / part if learning_rate is not None and optimizer == "sgd" else None,
                total_steps=total,
                epochs=None if total is None or samples_per_epoch is None else total * each / samples_per_epoch,
            )
        )
    return Advice(critical, max(1, round(critical)), tuple(choices))
