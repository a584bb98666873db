"""Which host fetches a block from the source: the one that the others then have it from."""

from collections.abc import Sequence

import numpy as np

from multiring.errors import ArgumentError

# The golden ratio's fractional part: its multiples fill every share of the unit interval evenly, at any time
# (Weyl 1916; Knuth, The Art of Computer Programming 3, section 6.4, theorem S).
_GOLDEN = (5**0.5 - 1) / 2


class Owners:
    """Deals blocks to hosts.

    Any piece of a data set is dealt as evenly as all of it, so that hosts that go through it fetch at the same pace.

    Args:
        weights: one for each host, > 0: its share; by the rates at which hosts send, say.

    Raises:
        ArgumentError: no host, or a weight that is not positive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not len(weights) or not all(0 < each < float("inf") for each in weights):
            raise ArgumentError(f"weights {list(weights)}: want one > 0 for each host")
        self.hosts = len(weights)
        shares = np.asarray(weights, dtype=np.float64)
        self._edges = np.cumsum(shares / shares.sum())
        self._is_even = len(set(weights)) == 1

    def owner(self, number: int) -> int:
        """Return the host that owns a block, by its number in the data set."""
        if self._is_even:
            return number % self.hosts
        place = (number + 1) * _GOLDEN % 1.0
        return min(self.hosts - 1, int(np.searchsorted(self._edges, place, side="right")))
