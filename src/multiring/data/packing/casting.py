"""Convert arrays to float16: normalise them by channel, and measure the loss of precision."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import DataError

Array = NDArray[Any]


class ChannelStatistics:
    """Mean, standard deviation, minimum and maximum of each channel of many arrays.

    Args:
        axis: the axis of the channels.

    Source of the update: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979, equation 2.1.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._count = 0
        self._mean: Array = np.zeros(0)
        self._squares: Array = np.zeros(0)
        self._least: Array = np.zeros(0)
        self._most: Array = np.zeros(0)

    def add(self, what: str, array: Array) -> None:
        """Add an array to the statistics.

        Raises:
            DataError: the array has another number of channels than earlier arrays, or contains NaN or infinity.
        """
        rows = self._by_channel(array).astype(np.float64)
        if not np.isfinite(rows).all():
            raise DataError(
                f"{what} contains NaN or infinity, so channel statistics cannot be computed; clean the data first"
            )
        if self._count and len(rows) != len(self._mean):
            raise DataError(f"{what} has {len(rows)} channels, but earlier arrays have {len(self._mean)}")
        count, mean = rows.shape[1], rows.mean(axis=1)
        squares = ((rows - mean[:, None]) ** 2).sum(axis=1)
        if not self._count:
            self._mean, self._squares = mean, squares
            self._least, self._most = rows.min(axis=1), rows.max(axis=1)
        else:
            total = self._count + count
            apart = mean - self._mean
            self._squares += squares + apart**2 * self._count * count / total
            self._mean += apart * count / total
            self._least = np.minimum(self._least, rows.min(axis=1))
            self._most = np.maximum(self._most, rows.max(axis=1))
        self._count += count

    def _by_channel(self, array: Array) -> Array:
        if not array.ndim or not array.size or not -array.ndim <= self._axis < array.ndim:
            raise DataError(f"an array of shape {array.shape} has no channels on axis {self._axis}")
        return np.moveaxis(array, self._axis, 0).reshape(array.shape[self._axis], -1)

    @property
    def mean(self) -> Array:
        """Return each channel's mean."""
        return self._mean

    @property
    def deviation(self) -> Array:
        """Return each channel's standard deviation, or 1 if the channel is constant."""
        found = np.sqrt(self._squares / max(1, self._count))
        return np.where(found > 0, found, 1.0)

    def told(self) -> dict[str, Any]:
        """Return the statistics for a manifest."""
        names = {"mean": self._mean, "std": self.deviation, "min": self._least, "max": self._most}
        return {"channel_axis": self._axis} | {name: [float(each) for each in value] for name, value in names.items()}


class HalfPrecision:
    """Converts arrays to (array - mean) / std as float16, and measures the loss."""

    def __init__(self, statistics: ChannelStatistics, axis: int) -> None:
        self._statistics = statistics
        self._axis = axis
        self._worst = np.zeros(len(statistics.mean))
        self._squares = np.zeros(len(statistics.mean))
        self._count = 0

    def cast(self, what: str, array: Array) -> Array:
        """Return an array, normalised and as float16.

        Raises:
            DataError: a normalised value is too large for float16.
        """
        shape = [1] * array.ndim
        shape[self._axis] = -1
        mean, deviation = (each.reshape(shape) for each in (self._statistics.mean, self._statistics.deviation))
        exact = (array.astype(np.float64) - mean) / deviation
        if np.abs(exact).max() > np.finfo(np.float16).max:
            raise DataError(f"{what} is {np.abs(exact).max():.3g} standard deviations from its mean: beyond float16")
        found = exact.astype(np.float16)
        lost = np.moveaxis(np.abs(found.astype(np.float64) - exact), self._axis, 0).reshape(len(self._worst), -1)
        self._worst = np.maximum(self._worst, lost.max(axis=1))
        self._squares += (lost**2).sum(axis=1)
        self._count += lost.shape[1]
        return found

    def told(self) -> dict[str, Any]:
        """Return the loss by channel, in standard deviations of the channel."""
        mean_square = self._squares / max(1, self._count)
        return {
            "normalised": True,
            "rms_loss": [float(each) for each in np.sqrt(mean_square)],
            "worst_loss": [float(each) for each in self._worst],
        }
