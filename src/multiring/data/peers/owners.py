"""Assign each block to an owner: the host that fetches it from the source and serves it to the other hosts."""

from collections.abc import Sequence

import numpy as np

from multiring.errors import ArgumentError

# The fractional part of the golden ratio. The fractional parts of its first n multiples fill the unit interval evenly
# for every n (Weyl 1916; Knuth, The Art of Computer Programming 3, section 6.4, theorem S).
_GOLDEN = (5**0.5 - 1) / 2


class Owners:
    """Assigns blocks to hosts, in proportion to weights.

    Each part of a data set is shared as evenly as the whole, so that hosts that read it in order fetch at equal rates.

    Args:
        weights: one weight > 0 for each host, for instance the rate at which the host can send.

    Raises:
        ArgumentError: there is no host, or a weight is not positive and finite.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not len(weights) or not all(0 < each < float("inf") for each in weights):
            raise ArgumentError(f"weights {list(weights)}: want a weight > 0 for each host")
        self.hosts = len(weights)
        shares = np.asarray(weights, dtype=np.float64)
        self._edges = np.cumsum(shares / shares.sum())
        self._is_even = len(set(weights)) == 1

    def owner(self, number: int) -> int:
        """Return the host that owns a block; `number` counts through the data set."""
        if self._is_even:
            return number % self.hosts
        place = (number + 1) * _GOLDEN % 1.0
        return min(self.hosts - 1, int(np.searchsorted(self._edges, place, side="right")))
