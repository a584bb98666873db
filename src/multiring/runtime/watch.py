"""Watch: what large all_reduces between hosts take, against what was predicted, and when all ranks speak of it.

At every CHECK_EVERY-th operation of a group its ranks start to gather what they measured, and do not wait; at the
next such operation they have it, decide alike, and from that operation on run other plans.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multiring._native import Context, FaultKind, Operation
from multiring.planner.review import Finding, Review
from multiring.topology import Topology

if TYPE_CHECKING:
    from multiring.runtime.handles import OperationHandle

_log = logging.getLogger("multiring")
CHECK_EVERY = 64  # operations; no rank is further ahead of another when plans are changed
LEAST_BYTES = 1 << 20  # what shorter buffers take, latency decides
_FEWEST = 4  # operations that say something together
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Measured:
    """An operation, and what it was predicted to take."""

    operation: Operation
    predicted_s: float


class Watch:
    """What one rank knows of one group. Not thread-safe: the group holds its lock."""

    def __init__(self, context: Context, ranks: tuple[int, ...], topology: Topology) -> None:
        self._context = context
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._host_of = topology.host_of()
        self._hosts = len(topology.hosts)
        self._review = Review(topology)
        self._posted: deque[Measured] = deque(maxlen=_MOST_KEPT)
        self.gathering: tuple[OperationHandle, NDArray[np.float64]] | None = None

    def add(self, operation: Operation, predicted_s: float) -> None:
        """Look at this operation once it has ended."""
        self._posted.append(Measured(operation, predicted_s))

    def row(self) -> NDArray[np.float64]:
        """Return this rank's row of the table, see `Review.check`, of what has ended since the last call."""
        ended: list[Measured] = []
        kept: list[Measured] = []
        for each in self._posted:
            (ended if self._context.has_ended(each.operation) else kept).append(each)
        row = np.zeros(2 + self._hosts)
        good = [each for each in ended if each.operation.fault == FaultKind.NONE]
        if len(good) < _FEWEST:
            return row
        self._posted = deque(kept, maxlen=_MOST_KEPT)
        row[:2] = busy_seconds(each.operation.ran_s for each in good), sum(each.predicted_s for each in good)
        for rank, rate in self._context.goodputs():
            if rank in self._index:
                host = self._host_of[self._index[rank]]
                row[2 + host] = max(row[2 + host], rate)
        return row

    def check(self, table: NDArray[np.float64]) -> Finding | None:
        """Return what is wrong; say so. What was measured of other plans is forgotten then."""
        finding = self._review.check(table)
        if finding is not None:
            self._posted.clear()
            _log.warning(
                "all_reduces of %d bytes and more on %d ranks take %.2f times what was predicted; %s",
                LEAST_BYTES,
                len(self._index),
                finding.ratio,
                f"slow is {'; '.join(finding.hosts)}" if finding.hosts else "no host is slower than the others",
            )
        return finding


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return for how long at least one of the (start, end) spans was open: operations side by side share the links."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
