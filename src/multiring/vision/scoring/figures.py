"""Figures of classifiers: precision over recall, calibration, and the comparison of two models."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CALIBRATION_BINS = 10


def precision_recall(scores: Floats, is_true: NDArray[np.bool_]) -> tuple[Floats, Floats, float]:
    """Return recall and precision, by falling threshold, and the average precision, 0 to 1.

    Samples of equal score are one step, so the order of the samples does not matter. The average precision is the sum
    of the steps of recall, each times its precision.

    Args:
        scores: of the samples.
        is_true: whether a sample is of the class; at least one is.
    """
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(is_true[order])
    last = np.append(np.diff(scores[order]) != 0, True)
    recall = right[last] / is_true.sum()
    precision = right[last] / (np.flatnonzero(last) + 1)
    return recall, precision, float(np.sum(np.diff(recall, prepend=0.0) * precision))


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How far a model's confidence agrees with its accuracy.

    Attributes:
        rows: for each tenth of confidence that has samples: the samples, their mean confidence and their accuracy.
        error: the mean difference of confidence and accuracy over the samples, 0 to 1 (the expected calibration error).
    """

    rows: tuple[tuple[int, float, float], ...]
    error: float


def calibration(confidence: Floats, is_right: NDArray[np.bool_]) -> Calibration:
    """Return the calibration of answers."""
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    rows = []
    for number in range(CALIBRATION_BINS):
        chosen = bins == number
        if chosen.any():
            rows.append((int(chosen.sum()), float(confidence[chosen].mean()), float(is_right[chosen].mean())))
    error = sum(count * abs(sure - right) for count, sure, right in rows) / max(1, len(confidence))
    return Calibration(rows=tuple(rows), error=error)


def sign_test(better: int, worse: int) -> float:
    """Return the probability of a difference at least this large if both models were equally good (McNemar, exact).

    Args:
        better: samples that only the first model has right.
        worse: samples that only the second one has right.
    """
    total, least = better + worse, min(better, worse)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, each) for each in range(least + 1)) / 2**total
    return float(min(1.0, 2 * tail))


def by_group(groups: list[str], is_right: Any) -> list[tuple[str, int, float]]:
    """Return each group's name, samples and mean, the lowest mean first; groups without a name are left out."""
    found = []
    for name in sorted({each for each in groups if each}):
        values = [float(value) for group, value in zip(groups, is_right, strict=True) if group == name]
        found.append((name, len(values), sum(values) / len(values)))
    return sorted(found, key=lambda row: (row[2], row[0]))
