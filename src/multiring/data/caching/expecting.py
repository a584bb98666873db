"""Compute which blocks of a pack a loader will need, and when, from its order."""

from collections.abc import Callable
from typing import Any

import numpy as np

from multiring.data.eviction import HORIZON, Deal, Numbers, Uses
from multiring.data.orders import Order
from multiring.data.readers.manifest import BLOCK_BYTES

_EPOCHS = 4  # the most epochs that are computed ahead
Spans = Callable[[Any], tuple[Any, Any, Any]]  # returns the shards, first bytes and last bytes of samples


class Expected:
    """The uses of a pack's blocks by some ranks.

    Args:
        order: the order of the samples in each epoch.
        deal: the positions of an epoch that belong to the ranks.
        spans: returns the shards, first bytes and last bytes of samples.
        firsts: the number of each shard's first block, and the number of all blocks.
        mine: bool (blocks,), the blocks whose uses count; by default all.
    """

    def __init__(self, order: Order, deal: Deal, spans: Spans, firsts: Any, mine: Any = None) -> None:
        self._order, self._spans, self._mine = order, spans, mine
        self._firsts = np.asarray(firsts, dtype=np.int64)
        self.deal = deal

    def uses(self, epoch: int, samples: int) -> Uses:
        """Return the uses of blocks from the step at sample `samples` of `epoch` on."""
        # Each epoch's order must be computed, which for many small epochs would cost much and change little.
        horizon = min(HORIZON, _EPOCHS * max(1, self.deal.epoch_uses))
        return Uses(self.needs, int(self._firsts[-1]), self.deal.use(epoch, samples), horizon)

    def needs(self, begin: int, end: int) -> tuple[Numbers, Numbers]:
        """Return the blocks that the uses `begin` to `end` need, and each block's use."""
        found = [self._order.samples(epoch, places) for epoch, places in self.deal.places(begin, end)]
        numbers = np.concatenate(found) if found else np.empty(0, np.int64)
        shards, first, last = self._spans(numbers)
        there = last >= 0
        at = begin + np.flatnonzero(there)
        lowest = self._firsts[shards[there]] + first[there] // BLOCK_BYTES
        count = self._firsts[shards[there]] + last[there] // BLOCK_BYTES - lowest + 1
        # A sample can span several blocks, and then needs all of them.
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        units, uses = np.repeat(lowest, count) + within, np.repeat(at, count)
        if self._mine is None:
            return units, uses
        kept = self._mine[units]
        return units[kept], uses[kept]
