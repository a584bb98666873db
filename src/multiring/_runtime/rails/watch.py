"""Watch: compare the times of large all_reduces between hosts with predictions.

If they differ, the ranks plan again. At every CHECK_EVERY-th operation of a group, its ranks start to gather their
measurements without waiting for them. At the next such operation they have all measurements, make the same decision,
and use the new plans from then on.

If operations take ten times as long as before, this check may take minutes. So a rank whose own connections have become
slow logs that at once. It cannot determine which end is slow, and names both ends. If a host is slow, both of its
neighbours log it.
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
from multiring._topology import Topology
from multiring.planner.review import Finding, Review

if TYPE_CHECKING:
    from multiring._runtime.group.handles import OperationHandle

_log = logging.getLogger("multiring")
CHECK_EVERY = 64  # the number of operations between two checks; ranks are never further apart when plans change
LEAST_BYTES = 1 << 20  # in bytes; the times of shorter buffers depend on latency
_FEWEST = 4  # operations needed for a measurement
_MOST_KEPT = 256
_SLOWDOWN = 10.0  # an operation is slow if it takes this many times its usual time
_SLOW_IN_A_ROW = 3  # a warning needs this many slow operations in a row
_LEAST_SLOWDOWN_S = 0.1
_ENOUGH = 8  # operations needed to know the usual time
_SILENT_S = 60.0  # the least time between two warnings
_SLOW = 0.2  # a connection is slow below this share of its usual rate
_MOST_RATES = 64
_USED = 1 / 8  # a connection with less than this share of the busiest connection's bytes carried agreements only


@dataclass(frozen=True, slots=True)
class MeasuredOperation:
    """An operation and its predicted time."""

    operation: Operation
    predicted_s: float


class Flows:
    """The rates of this rank's connections to other hosts.

    Only the time in which there is data to send counts. The kernel's own rate (`tcpi_delivery_rate`) is not usable: it
    keeps its last value on an idle connection, and short pieces of data never lower it.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, float]] = {}

    def rates(self, flows: Iterable[tuple[int, int, bool, int, float]]) -> dict[int, float]:
        """Return the bytes per second that each peer received since the last call.

        Peers that received little are left out.

        Args:
            flows: tuples of `Context.rails`: (peer, rail, is up, bytes, busy seconds). The last two items are totals.
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
    """One rank's measurements of one group.

    The object is not thread-safe: the caller must hold the group's lock.
    """

    def __init__(
        self, context: Context, ranks: tuple[int, ...], own: int, topology: Topology, *, by_mpi: bool = False
    ) -> None:
        self._context = context
        self._by_mpi = by_mpi  # with MPI, multiring's own connections carry control frames only
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._host_of = topology.host_of()
        self._hosts = len(topology.hosts)
        self._review = Review(topology)
        self._posted: deque[MeasuredOperation] = deque(maxlen=_MOST_KEPT)
        self._slowdowns = SlowdownDetector()
        self._usual_rates: dict[int, deque[float]] = {}  # the bytes per second that each host received
        self._own_host = self._host_of[own]
        self._lately = Flows()  # the rates since the last operation
        self._checked = Flows()  # the rates since the last row
        self.gathering: tuple[OperationHandle, NDArray[np.float64]] | None = None

    def add(self, operation: Operation, predicted_s: float) -> None:
        """Register an operation, which is evaluated once it has ended."""
        each = MeasuredOperation(operation, predicted_s)
        self._posted.append(each)
        self._slowdowns.posted.append(each)
        slower = self._slowdowns.look(self._context)
        if slower is not None:
            self._name_slow(slower)
        elif not self._slowdowns.slow:
            for host, rate in self._rates(self._lately).items():
                self._usual_rates.setdefault(host, deque(maxlen=_MOST_RATES)).append(rate)

    def _rates(self, flows: Flows) -> dict[int, float]:
        """Return the bytes per second that each host received from this rank.

        The rates cover the time since the last call that read the flows.
        """
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
        # A burst through a token bucket seems faster than the wire, so the rate is limited to the stated bandwidth.
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
        """Return this rank's row of the table for `Review.check`.

        The row covers the operations that ended since the last call.
        """
        ended: list[MeasuredOperation] = []
        kept: list[MeasuredOperation] = []
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
        """Return and log the finding of the review, if any.

        A finding discards the measurements of the old plans.
        """
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
    """Detects that operations take many times as long as before.

    Times are relative to the predicted times.
    """

    def __init__(self) -> None:
        self.posted: deque[MeasuredOperation] = deque(maxlen=_MOST_KEPT)
        self.usual: deque[float] = deque(maxlen=_MOST_KEPT)  # ratios of operations that were not slow
        self.slow = 0  # the number of slow operations in a row
        self._silent_until_s = 0.0

    def look(self, context: Context) -> float | None:
        """Evaluate the operations that have ended.

        Return the factor of the slowdown if a warning is due, else None.
        """
        while self.posted and context.has_ended(self.posted[0].operation):
            each = self.posted.popleft()
            if each.operation.fault == FaultKind.NONE and each.predicted_s > 0:
                start_s, end_s = each.operation.ran_s
                slower = self.note(end_s - start_s, each.predicted_s)
                if slower is not None:
                    return slower
        return None

    def note(self, taken_s: float, predicted_s: float) -> float | None:
        """Record the time of an operation. The result is as for `look`."""
        ratio = taken_s / predicted_s
        # The cheap check comes first, because most operations are short.
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
    """Return the total time in which at least one of the (start, end) spans was open.

    Concurrent operations share the links, so their times must not be added.
    """
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
