"""Grade predictions of published runs: three constants, each row predicted by constants that were fitted without it.

The constants are the same for all rows:

- `link_share`: the part of its stated rate that a link reaches.
- `hidden_share`: the part of the communication during backward that backward really hides.
- `late_s`: the seconds by which the slowest rank is later, for each doubling of the ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from multiring._simulator.layers import units_of
from multiring._simulator.published import PublishedRow
from multiring._simulator.step import part_of, profile_of, step_of
from multiring._topology import Link, Topology
from multiring.errors import ArgumentError

_LINK_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_HIDDEN_SHARES = np.linspace(0, 1, 21)
_LATE_S = np.linspace(0, 0.03, 61)
# Two rows that differ by no more than this are not expected in an order.
_APART = 0.04
# Three constants and a row that is left out.
_LEAST = 4

_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScalingConstants:
    """The constants of a prediction; `grades` of the module describes them."""

    link_share: float
    hidden_share: float
    late_s: float


@dataclass(frozen=True, slots=True)
class GradedRow:
    """A row with its prediction, and by how much that is wrong: 0 inside the published range."""

    row: PublishedRow
    predicted: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The grade of all rows that count. Errors are parts of 1, so 0.01 is a point.

    `constants` are fitted to all counted rows. `errors_halved` and `errors_raised` are the mean errors with one of
    them multiplied by 0.5 and 1.5, with the constants in the order of their fields; a share is at most 1.
    """

    rows: list[GradedRow]
    constants: ScalingConstants
    error: float
    error_of_constant: float
    error_of_regression: float
    worst: GradedRow
    pairs: int
    pairs_right: int
    error_fitted: float
    errors_halved: tuple[float, ...]
    errors_raised: tuple[float, ...]

    @property
    def counted(self) -> list[GradedRow]:
        """The rows that count."""
        return [each for each in self.rows if not each.row.uncounted]


def grade_of(rows: Sequence[PublishedRow]) -> Grade:
    """Predict all rows and grade those that count.

    Raises:
        ArgumentError: too few rows count.
    """
    counted = [row for row in rows if not row.uncounted]
    if len(counted) < _LEAST:
        raise ArgumentError(
            f"{len(counted)} of {len(rows)} rows count: want at least {_LEAST}, because three constants are fitted "
            "without the row that they predict"
        )
    costs = {row.name: _Costs(row) for row in rows}
    whole = np.stack([costs[row.name].predictions() for row in counted])
    errors = np.stack([_errors(row, each) for row, each in zip(counted, whole, strict=True)])
    total = errors.sum(axis=0)
    predicted = {
        row.name: float(each[np.unravel_index(np.argmin(total - wrong), total.shape)])
        for row, each, wrong in zip(counted, whole, errors, strict=True)
    }
    link, hidden, late = np.unravel_index(np.argmin(total), total.shape)
    constants = ScalingConstants(_LINK_SHARES[link], float(_HIDDEN_SHARES[hidden]), float(_LATE_S[late]))
    graded = []
    for row in rows:
        value = predicted.get(row.name, costs[row.name].prediction(constants))
        graded.append(GradedRow(row, value, float(_errors(row, np.array(value)))))
    kept = [each for each in graded if not each.row.uncounted]

    def error_with(changed: ScalingConstants) -> float:
        found = [float(_errors(row, np.array(costs[row.name].prediction(changed)))) for row in counted]
        return sum(found) / len(found)

    pairs = [_is_right(one, other) for one, other in combinations(kept, 2) if _are_apart(one.row, other.row)]
    return Grade(
        rows=graded,
        constants=constants,
        error=sum(each.error for each in kept) / len(kept),
        error_of_constant=_error_of_constant(counted),
        error_of_regression=_error_of_regression(counted, [costs[row.name].bytes_per_compute_s for row in counted]),
        worst=max(kept, key=lambda each: each.error),
        pairs=len(pairs),
        pairs_right=sum(pairs),
        error_fitted=error_with(constants),
        errors_halved=tuple(error_with(each) for each in _scaled(constants, 0.5)),
        errors_raised=tuple(error_with(each) for each in _scaled(constants, 1.5)),
    )


def ratios_of(rows: Sequence[PublishedRow]) -> list[float]:
    """Return the measured step divided by the step that stated rates predict, for each row that counts.

    The middle of a published range counts as measured.
    """
    stated = ScalingConstants(1.0, 1.0, 0.0)
    return [_Costs(row).prediction(stated) / ((row.low + row.high) / 2) for row in rows if not row.uncounted]


class _Costs:
    """What a row's step costs in parts of its compute, for each part of their rates that links reach."""

    def __init__(self, row: PublishedRow) -> None:
        self._row = row
        self._units = units_of(row.layers, row.gradient_bytes)
        compute_s = row.batch_per_rank / row.rate.samples_per_s
        self.bytes_per_compute_s = sum(unit.parameter_bytes for unit in self._units) / compute_s

    def predictions(self) -> _Numbers:
        """Return the efficiencies, shape (link shares, hidden shares, late seconds)."""
        return np.stack([self._efficiency(share, _HIDDEN_SHARES[:, None], _LATE_S) for share in _LINK_SHARES])

    def prediction(self, constants: ScalingConstants) -> float:
        hidden, late = np.array(constants.hidden_share), np.array(constants.late_s)
        return float(self._efficiency(constants.link_share, hidden, late))

    def _efficiency(self, link_share: float, hidden_share: _Numbers, late_s: _Numbers) -> _Numbers:
        many = self._time(self._row.ranks, link_share, hidden_share, late_s)
        return self._time(self._row.relative_to, link_share, hidden_share, late_s) / many

    def _time(self, ranks: int, link_share: float, hidden_share: _Numbers, late_s: _Numbers) -> _Numbers:
        """Return the time of a step in parts of its compute."""
        row = self._row
        topology = _slowed(part_of(row.cluster.topology, ranks), link_share)
        step = step_of(profile_of(self._units, row.batch_per_rank, row.rate.samples_per_s, ranks), topology)
        exposed = step.seconds.exchange / step.seconds.compute
        hidden = step.communication_s / step.seconds.compute - exposed
        found: _Numbers = 1 + exposed + (1 - hidden_share) * hidden + late_s * math.log2(ranks) / step.seconds.compute
        return found


def _slowed(topology: Topology, share: float) -> Topology:
    def slow(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share)

    return replace(topology, shm=slow(topology.shm), rails=tuple(map(slow, topology.rails)))


def _errors(row: PublishedRow, predicted: _Numbers) -> _Numbers:
    return np.maximum(np.maximum(row.low - predicted, predicted - row.high), 0.0)


def _scaled(constants: ScalingConstants, times: float) -> list[ScalingConstants]:
    return [
        replace(constants, link_share=min(constants.link_share * times, 1.0)),
        replace(constants, hidden_share=min(constants.hidden_share * times, 1.0)),
        replace(constants, late_s=constants.late_s * times),
    ]


def _error_of_constant(rows: Sequence[PublishedRow]) -> float:
    """Return the mean error of the best constant guess for the other rows."""
    # The sum of the errors is least at an end of a range.
    guesses = np.array([end for row in rows for end in (row.low, row.high)])
    return _left_out(np.stack([_errors(row, guesses) for row in rows]))


def _error_of_regression(rows: Sequence[PublishedRow], slopes: Sequence[float]) -> float:
    """Return the mean error of the line through the other rows that has the least error there.

    The line is a function of the bytes of gradients for each second of compute.
    """
    at = np.array(slopes)
    ends = np.array([(row.low, row.high) for row in rows])
    lines = []  # The sum of the errors is least on a line through two ends of ranges.
    for (x, here), (other_x, there) in combinations(zip(at, ends, strict=True), 2):
        for y in {*here}:
            for other_y in {*there}:
                slope = (other_y - y) / (other_x - x) if other_x != x else 0.0
                lines.append((y - slope * x, slope))
    parts = np.array(lines)
    return _left_out(np.stack([_errors(row, parts[:, 0] + parts[:, 1] * x) for row, x in zip(rows, at, strict=True)]))


def _left_out(errors: _Numbers) -> float:
    """Return the mean error, each row by the candidate that is best for the others; shape (rows, candidates)."""
    total = errors.sum(axis=0)
    return float(np.mean([wrong[np.argmin(total - wrong)] for wrong in errors]))


def _are_apart(one: PublishedRow, other: PublishedRow) -> bool:
    return max(one.low - other.high, other.low - one.high) > _APART


def _is_right(one: GradedRow, other: GradedRow) -> bool:
    return (one.predicted < other.predicted) == (one.row.high < other.row.low)
