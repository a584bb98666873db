"""Watch: what large all_reduces between hosts take, against what was predicted, and when all ranks speak of it.

At every CHECK_EVERY-th operation of a group its ranks start to gather what they measured, and do not wait; at the
next such operation they have it, decide alike, and from that operation on run other plans.

Where operations take ten times what they took before that would be minutes: a rank whose own connections crawl says so
at once. It cannot tell which end is to blame, and names both; of a slow host both neighbours speak.
"""

import logging
import math
import statistics
import time
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
    from multiring.runtime.group.handles import OperationHandle

_log = logging.getLogger("multiring")
CHECK_EVERY = 64  # operations; no rank is further ahead of another when plans are changed
LEAST_BYTES = 1 << 20  # what shorter buffers take, latency decides
_FEWEST = 4  # operations that say something together
_MOST_KEPT = 256
_SLOWDOWN = 10.0  # times what operations took before
_SLOW_IN_A_ROW = 3  # such operations in a row are worth a word
_LEAST_SLOWDOWN_S = 0.1
_ENOUGH = 8  # operations tell what is usual
_SILENT_S = 60.0  # after a word
_SLOW = 0.2  # of what a connection usually carries
_MOST_RATES = 64
_USED = 1 / 8  # of what the busiest way took: what took less carried agreements


@dataclass(frozen=True, slots=True)
class Measured:
    """An operation, and what it was predicted to take."""

    operation: Operation
    predicted_s: float


class Flows:
    """What this rank's ways to other hosts carry in the seconds in which they have something to carry.

    The kernel's own rate (`tcpi_delivery_rate`) does not serve: it stays what it was once where a connection carries
    nothing any more, and what comes in short pieces never lowers it.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, float]] = {}

    def rates(self, flows: Iterable[tuple[int, int, bool, int, float]]) -> dict[int, float]:
        """Return the bytes per second that each peer took since the last call; without peers that took hardly any.

        Args:
            flows: as of `Context.rails`: (peer, rail, is up, bytes, busy seconds), of which the last two grow.
        """
        taken: dict[int, int] = {}
        rates: dict[int, float] = {}
        for peer, rail, _, carried, busy_s in flows:
            before, before_s = self._before.get((peer, rail), (0, 0.0))
            self._before[peer, rail] = carried, busy_s
            taken[peer] = taken.get(peer, 0) + carried - before
            if busy_s > before_s:
                rates[peer] = rates.get(peer, 0.0) + (carried - before) / (busy_s - before_s)
        least = _USED * max(taken.values(), default=0)
        return {peer: rate for peer, rate in rates.items() if taken[peer] >= least and rate > 0}


class Watch:
    """What one rank knows of one group. Not thread-safe: the group holds its lock."""

    def __init__(
        self, context: Context, ranks: tuple[int, ...], own: int, topology: Topology, *, by_mpi: bool = False
    ) -> None:
        self._context = context
        self._by_mpi = by_mpi  # the kernel sees frames only
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._host_of = topology.host_of()
        self._hosts = len(topology.hosts)
        self._review = Review(topology)
        self._posted: deque[Measured] = deque(maxlen=_MOST_KEPT)
        self._slowdowns = SlowdownDetector()
        self._usual_rates: dict[int, deque[float]] = {}  # by host, bytes per second that it took from this rank
        self._own_host = self._host_of[own]
        self._lately = Flows()  # since the last operation
        self._checked = Flows()  # since the last row
        self.gathering: tuple[OperationHandle, NDArray[np.float64]] | None = None

    def add(self, operation: Operation, predicted_s: float) -> None:
        """Look at this operation once it has ended."""
        each = Measured(operation, predicted_s)
        self._posted.append(each)
        self._slowdowns.posted.append(each)
        slower = self._slowdowns.look(self._context)
        if slower is not None:
            self._name_slow(slower)
        elif not self._slowdowns.slow:
            for host, rate in self._rates(self._lately).items():
                self._usual_rates.setdefault(host, deque(maxlen=_MOST_RATES)).append(rate)

    def _rates(self, flows: Flows) -> dict[int, float]:
        """Return the bytes per second that each host took from this rank since `flows` were looked at."""
        rates: dict[int, float] = {}
        if self._by_mpi:
            by_rank = {rank: float(rate) for rank, rate in self._context.goodputs() if rank in self._index}
        else:
            by_rank = flows.rates(flow for flow in self._context.rails() if flow[0] in self._index)
        for rank, rate in by_rank.items():
            host = self._host_of[self._index[rank]]
            rates[host] = max(rates.get(host, 0.0), rate)
        return rates

    def _name_slow(self, slower: float) -> None:
        # What passes a token bucket at once seems faster than the wire: never more than is stated.
        stated = self._review.stated()
        usual = {
            host: min(statistics.median(rates), stated[host], stated[self._own_host])
            for host, rates in self._usual_rates.items()
        }
        ways = [
            f"{self._review.named(host)} takes {rate / 1e6:.3g} instead of {usual[host] / 1e6:.3g} MB/s"
            for host, rate in self._rates(self._lately).items()
            if rate < _SLOW * usual.get(host, 0.0)
        ]
        if ways:
            _log.warning(
                "all_reduces of %d bytes and more on %d ranks take %.0f times what they took before; from here, %s, %s",
                LEAST_BYTES,
                len(self._index),
                slower,
                self._review.named(self._own_host),
                "; ".join(ways),
            )

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
        for host, rate in self._rates(self._checked).items():
            row[2 + host] = rate
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
                f"slow is {'; '.join(finding.hosts)}"
                if finding.hosts
                else "no host's connections are slower than the others'",
            )
        return finding


class SlowdownDetector:
    """Whether operations have come to take many times what they took before, each beside what was predicted."""

    def __init__(self) -> None:
        self.posted: deque[Measured] = deque(maxlen=_MOST_KEPT)
        self.usual: deque[float] = deque(maxlen=_MOST_KEPT)  # ratios of operations that did not crawl
        self.slow = 0  # in a row
        self._silent_until_s = 0.0

    def look(self, context: Context) -> float | None:
        """Return how many times slower operations have become, where that is worth a word; else None."""
        while self.posted and context.has_ended(self.posted[0].operation):
            each = self.posted.popleft()
            if each.operation.fault == FaultKind.NONE and each.predicted_s > 0:
                start_s, end_s = each.operation.ran_s
                slower = self.note(end_s - start_s, each.predicted_s)
                if slower is not None:
                    return slower
        return None

    def note(self, taken_s: float, predicted_s: float) -> float | None:
        """Take in what an operation took; see `look`."""
        ratio = taken_s / predicted_s
        # First what costs nothing to tell: most operations are short.
        usual = math.inf if taken_s < _LEAST_SLOWDOWN_S or len(self.usual) < _ENOUGH else statistics.median(self.usual)
        if ratio <= _SLOWDOWN * usual:
            self.slow = 0
            self.usual.append(ratio)
            return None
        self.slow += 1
        now_s = time.monotonic()
        if self.slow < _SLOW_IN_A_ROW or now_s < self._silent_until_s:
            return None
        self._silent_until_s = now_s + _SILENT_S
        return ratio / usual


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return for how long at least one of the (start, end) spans was open: operations side by side share the links."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
