"""The 90 % interval of a predicted step: how far predictions of published runs were from what was measured."""

from collections.abc import Sequence

import numpy as np

from multiring._simulator.grades import ratios_of
from multiring._simulator.published import PublishedRow

# The measured step of 50 published runs divided by the prediction, from the 5th to the 95th percentile: what
# `measured_ratios` returns for benchmarks/evidence/foresight/published_runs.toml, which a test compares. All of these
# runs train ResNet-50 on V100.
PUBLISHED_RUNS = 50
_LOW, _HIGH = 1.009, 1.404


def step_interval(step_s: float, ranks: int) -> tuple[float, float] | None:
    """Return the interval of a known model's predicted step in seconds; None for one rank, whose rate is given."""
    return None if ranks == 1 else (_LOW * step_s, _HIGH * step_s)


def measured_ratios(rows: Sequence[PublishedRow]) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of the measured steps of rows, divided by the predicted steps.

    The predictions are those without fitted constants, as for a cluster that nobody has measured.
    """
    low, high = np.quantile(ratios_of(rows), (0.05, 0.95))
    return float(low), float(high)
