"""Which blocks of a pack a loader needs, and when: its order is computed, and so is this."""

from collections.abc import Callable
from typing import Any

import numpy as np

from multiring.data.eviction import HORIZON, Deal, Numbers, Uses
from multiring.data.orders import Order
from multiring.data.packing.manifest import BLOCK_BYTES

_EPOCHS = 4  # that are looked ahead at most
Spans = Callable[[Any], tuple[Any, Any, Any]]  # samples to their shards, first bytes and last bytes


class Expected:
    """The uses of a pack's blocks by some ranks.

    Args:
        order: of each epoch.
        deal: which places of it the ranks have.
        spans: tells where samples lie.
        firsts: the number of each shard's first block, and of the blocks behind the last.
        mine: bool (blocks,): which of them count; all by default.
    """

    def __init__(self, order: Order, deal: Deal, spans: Spans, firsts: Any, mine: Any = None) -> None:
        self._order, self._spans, self._mine = order, spans, mine
        self._firsts = np.asarray(firsts, dtype=np.int64)
        self.deal = deal

    def uses(self, epoch: int, samples: int) -> Uses:
        """Return the uses from a step of an epoch on."""
        # Each epoch's order is looked up anew, so that many of a few samples would cost much and say little.
        horizon = min(HORIZON, _EPOCHS * max(1, self.deal.epoch_uses))
        return Uses(self.needs, int(self._firsts[-1]), self.deal.use(epoch, samples), horizon)

    def needs(self, begin: int, end: int) -> tuple[Numbers, Numbers]:
        """Return the blocks that uses `begin` to `end` need, and of which use each is."""
        found = [self._order.samples(epoch, places) for epoch, places in self.deal.places(begin, end)]
        numbers = np.concatenate(found) if found else np.empty(0, np.int64)
        shards, first, last = self._spans(numbers)
        there = last >= 0
        at = begin + np.flatnonzero(there)
        lowest = self._firsts[shards[there]] + first[there] // BLOCK_BYTES
        count = self._firsts[shards[there]] + last[there] // BLOCK_BYTES - lowest + 1
        # A sample that lies in several blocks needs each of them.
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        units, uses = np.repeat(lowest, count) + within, np.repeat(at, count)
        if self._mine is None:
            return units, uses
        kept = self._mine[units]
        return units[kept], uses[kept]
