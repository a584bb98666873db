"""Confidence intervals of scores, over the samples of the data set on which they were measured."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import require_whole
from multiring.errors import ArgumentError

Z_95 = 1.959964  # the 97.5 % quantile of the normal distribution
# The 97.5 % quantile of Student's distribution with JACKKNIFE_GROUPS - 1 degrees of freedom.
JACKKNIFE_GROUPS, T_95 = 20, 2.093024


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, in percent.

    Args:
        hits: the number of samples in the share.
        total: the number of all samples, at least one; they are assumed to be independent.

    Raises:
        ArgumentError: `total` is not a whole number from 1 on, or `hits` is not one from 0 to `total`.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    total = require_whole("total", total, 1)
    hits = require_whole("hits", hits, 0, total)
    share, spread = hits / total, Z_95**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def jackknife_intervals(
    groups: NDArray[np.int64], score: Callable[[NDArray[np.int64]], NDArray[np.float64]]
) -> list[tuple[float, float]]:
    """Return 95 % intervals of scores by the delete-a-group jackknife, for scores that are not shares.

    Args:
        groups: (JACKKNIFE_GROUPS, n) counts of random groups of samples with about equal sizes.
        score: computes the scores (m,) from the sum of some groups' counts.

    Returns:
        m intervals, in the scores' unit.

    Raises:
        ArgumentError: `groups` is no array of JACKKNIFE_GROUPS rows.

    Source: Kott, "The delete-a-group jackknife", Journal of Official Statistics 17 (2001).
    """
    found = np.asarray(groups)
    if found.ndim != 2 or len(found) != JACKKNIFE_GROUPS or found.dtype.kind not in "iuf":
        raise ArgumentError(
            f"groups of shape {found.shape} and type {found.dtype}: want counts of shape ({JACKKNIFE_GROUPS}, n), one "
            "row for each group"
        )
    groups = found
    whole = groups.sum(0)
    without = np.stack([score(whole - each) for each in groups])
    middle = score(whole)
    half = T_95 * np.sqrt((JACKKNIFE_GROUPS - 1) / JACKKNIFE_GROUPS * ((without - without.mean(0)) ** 2).sum(0))
    return [(float(low), float(high)) for low, high in zip(middle - half, middle + half, strict=True)]
