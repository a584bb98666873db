"""Statistics that distinguish an order from a Fisher-Yates shuffle, as p-values over many keys."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Numbers = NDArray[Any]
Order = Callable[[int, Numbers], Numbers]  # maps a key and places to samples

KEYS = 1000
_BINS = 64
_LOOKED_AT = 48  # places per key, each with near and far neighbours


def p_values(length: int, order: Order, batch: int) -> dict[str, float]:
    """Return the p-value of each statistic, under the hypothesis that all orders are equally likely."""
    places = np.unique(np.linspace(0, length - 1, min(length, _LOOKED_AT)).astype(np.int64))
    lags = np.array([1 << bit for bit in range(length.bit_length() - 1)])
    differences: dict[int, list[Numbers]] = {lag: [] for lag in lags}
    position, second, together, correlations = [], [], [], []
    for key in range(KEYS):
        begins = np.array([key * 7919 % (length - lag) for lag in lags])
        near = np.arange(min(batch, length)) + batch * (key % max(1, length // batch))
        three = (key % max(1, length - 2) + np.arange(3)) % length
        # A single call for all places, because the call is the slow part.
        asked = (places, three, begins, begins + lags, near)
        drawn, line, first, last, batched = np.split(
            order(key, np.concatenate(asked)), np.cumsum([len(each) for each in asked])[:-1]
        )
        position.append(drawn[key % len(places)][None])
        second.append((line[2:] - 2 * line[1:2] + line[:1]) % length)
        for lag, difference in zip(lags, (last - first) % length, strict=True):
            differences[lag].append(difference[None])
        together.append(int(np.isin((batched + 1) % length, batched).sum()))
        correlations.append(float(np.corrcoef(drawn, order(key + KEYS, places))[0, 1]))
    values = {"position": _uniform(position, length, 0)}
    values |= {f"difference at {lag}": _uniform(each, length, 1) for lag, each in differences.items()}
    if length > 64:  # in shorter orders, second differences are not uniform because samples never repeat
        values["second differences"] = _uniform(second, length, 0)
    expected = batch * (batch - 1) / (length - 1)
    values["in one batch"] = _total(together, expected)
    values["between epochs"] = float(stats.ttest_1samp(correlations, 0.0).pvalue)
    return values


def _uniform(drawn: list[Numbers], length: int, least: int) -> float:
    """Return the p-value of numbers that should be uniform on least ... length - 1."""
    numbers = np.concatenate(drawn) - least
    count = length - least
    edges = np.unique(np.linspace(0, count, min(count, _BINS) + 1).astype(np.int64))
    if len(edges) == 2:
        return 1.0
    seen = np.histogram(numbers, edges)[0]
    return float(stats.chisquare(seen, len(numbers) * np.diff(edges) / count).pvalue)


def _total(counts: list[int], expected: float) -> float:
    """Return the p-value for the counts of samples whose successor was in the same batch, summed over keys."""
    if expected >= 1:  # use the observed spread
        return float(stats.ttest_1samp(counts, expected).pvalue)
    total, mean = sum(counts), expected * len(counts)
    return float(min(1.0, 2 * min(stats.poisson.cdf(total, mean), stats.poisson.sf(total - 1, mean))))


def fisher_yates(length: int) -> Order:
    """Return NumPy's shuffle as an order."""

    def order(key: int, places: Numbers) -> Numbers:
        return np.random.default_rng(key).permutation(length)[places]

    return order


def affine(length: int) -> Order:
    """Return the order a x + b mod length, with `a` coprime to `length`."""

    def order(key: int, places: Numbers) -> Numbers:
        generator = np.random.default_rng(key)
        factor = next(a for a in _drawn(generator, length) if np.gcd(a, length) == 1)
        return (factor * places + int(generator.integers(length))) % length

    return order


def _drawn(generator: np.random.Generator, length: int) -> Iterator[int]:
    while True:
        yield int(generator.integers(1, max(2, length)))
