"""Eviction policies of a cache's tiers: by the next use, or by the last use (LRU) for comparison.

A unit is kept or evicted as a whole; it is a block or a sample. This module does no I/O and never waits.

Keeping the units that are needed soonest is optimal if all units have the same size (Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966, doi:10.1147/sj.52.0078). A policy that
rejects a new unit, if it is needed later than all kept units, is also optimal. For units of different sizes the optimum
is hard to compute. The policy then compares several choices, and takes the choice that leaves the most bytes to the
soonest uses.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.data.eviction_search import searched
from multiring.errors import ArgumentError

NEVER = np.inf
# The number of uses that are computed ahead, in 16 MiB for each reader. A use beyond this horizon counts as never.
HORIZON = 1 << 20
_FEW = 32  # a tier that holds fewer units can leave some per cent of its bytes unused
_UNEQUAL = 0.8  # sizes are unequal if the smallest unit is below this fraction of the largest

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]
# Called with the first use and the end of a range of uses, counted over all epochs. It returns the units that these
# uses need, in the order of the uses, and the number of each unit's use.
UnitsAt = Callable[[int, int], tuple[Numbers, Numbers]]


class Policy(Protocol):
    """Decides which units a tier of limited size keeps.

    Attributes:
        held: bool (units,), whether the tier holds each unit.
        used_bytes: the bytes of the held units.
    """

    held: NDArray[np.bool_]
    used_bytes: int

    def touch(self, unit: int) -> None:
        """Record a use of a unit."""
        ...

    def put(self, unit: int) -> None:
        """Record that the tier holds a unit."""
        ...

    def drop(self, unit: int) -> None:
        """Record that the tier no longer holds a unit."""
        ...

    def admit(
        self, unit: int, times: Times, own: float | None = None, upcoming: Sequence[int] = ()
    ) -> list[int] | None:
        """Admit a unit and return the units to evict for it, or None to reject it."""
        ...


class _Held:
    """The units that a tier holds, and their bytes."""

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], capacity_bytes: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        if capacity_bytes < 0 or (self.sizes < 0).any():
            raise ArgumentError(
                f"a tier of {capacity_bytes} bytes with units of {self.sizes.min(initial=0)}: want sizes of 0 or more"
            )
        self.capacity_bytes = capacity_bytes
        self.held = np.zeros(len(self.sizes), dtype=np.bool_)
        self.used_bytes = 0

    def put(self, unit: int) -> None:
        """Record that the tier holds a unit."""
        if not self.held[unit]:
            self.held[unit] = True
            self.used_bytes += int(self.sizes[unit])

    def drop(self, unit: int) -> None:
        """Record that the tier no longer holds a unit."""
        if self.held[unit]:
            self.held[unit] = False
            self.used_bytes -= int(self.sizes[unit])

    def _swap(self, unit: int, victims: list[int]) -> list[int]:
        for each in victims:
            self.drop(each)
        self.put(unit)
        return victims


class NextUse(_Held):
    """Keeps the units that are needed soonest.

    It rejects a unit that is needed later than all units that it would replace.

    Args:
        sizes: the bytes of each unit.
        capacity_bytes: the bytes of the tier.

    Raises:
        ArgumentError: a size is negative.
    """

    @property
    def is_coarse(self) -> bool:
        """Return whether the units are so few and unequal that the choice depends on which units fit together."""
        sizes = self.sizes[self.sizes > 0]
        return len(sizes) > 0 and self.capacity_bytes < _FEW * sizes.mean() and sizes.min() < _UNEQUAL * sizes.max()

    def touch(self, unit: int) -> None:
        """Do nothing: only future uses matter."""

    def admit(
        self, unit: int, times: Times, own: float | None = None, upcoming: Sequence[int] = ()
    ) -> list[int] | None:
        """Admit a unit and return the units to evict for it, or None to reject it.

        Args:
            unit: the unit's number.
            times: float (units,), the time from now to each unit's next use, in any measure of time; NEVER if unknown.
            own: a time that replaces `times[unit]`. It serves units whose first uses only pay for the fetch.
            upcoming: the units of the next uses in order, if they are known. The policy uses them only if `is_coarse`.
        """
        due = float(times[unit]) if own is None else own
        size = int(self.sizes[unit])
        missing = self.used_bytes + size - self.capacity_bytes
        if self.held[unit] or missing <= 0:
            return self._swap(unit, [])
        if size > self.capacity_bytes or not due < NEVER:
            return None
        if len(upcoming) and self.is_coarse:
            held = np.flatnonzero(self.held).tolist()
            chosen = searched(held, unit, list(upcoming), self.sizes.tolist(), self.capacity_bytes)
            return None if chosen is None else self._swap(unit, chosen)
        later = np.flatnonzero(self.held & (times > due))
        victims = _victims(later, times[later], self.sizes[later], missing)
        return None if victims is None else self._swap(unit, victims)


def _victims(units: Any, times: Times, sizes: Any, missing: int) -> list[int] | None:
    """Return the units to evict so that `missing` bytes become free, or None if all units together are too small.

    The units that are needed latest are chosen first. A chosen unit is kept after all if the other chosen units free
    enough bytes.
    """
    order = np.argsort(-times, kind="stable")
    freed = np.cumsum(sizes[order])
    count = int(np.searchsorted(freed, missing)) + 1
    if count > len(order):
        return None
    chosen = order[:count].tolist()
    spare = int(freed[count - 1]) - missing
    for each in reversed(chosen[:]):  # begin with the unit that is needed soonest
        if sizes[each] <= spare:
            chosen.remove(each)
            spare -= int(sizes[each])
    return [int(units[each]) for each in chosen]


class LeastRecent(_Held):
    """LRU: admits every unit, and evicts the least recently used units."""

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], capacity_bytes: int) -> None:
        super().__init__(sizes, capacity_bytes)
        self._recent: OrderedDict[int, None] = OrderedDict()

    def touch(self, unit: int) -> None:
        """Record a use of a unit."""
        if self.held[unit]:
            self._recent.move_to_end(unit)

    def admit(
        self,
        unit: int,
        times: Times,  # noqa: ARG002 -- a policy's signature
        own: float | None = None,  # noqa: ARG002
        upcoming: Sequence[int] = (),  # noqa: ARG002
    ) -> list[int] | None:
        """Admit a unit and return the units to evict, or None if it exceeds the tier."""
        if self.sizes[unit] > self.capacity_bytes:
            return None
        victims = []
        while self.used_bytes + self.sizes[unit] > self.capacity_bytes:
            oldest, _ = self._recent.popitem(last=False)
            victims.append(oldest)
            self.drop(oldest)
        self._recent[unit] = None
        return self._swap(unit, victims)


class Uses:
    """The next uses of each unit by one reader, up to a horizon.

    Args:
        units_at: returns the units of a range of uses; see `UnitsAt`.
        units: the number of units.
        begin: the reader's first use.
        horizon: how many uses are computed at a time.
    """

    def __init__(self, units_at: UnitsAt, units: int, begin: int = 0, horizon: int = HORIZON) -> None:
        self._units_at, self._units, self._horizon = units_at, units, horizon
        self._look(begin)

    def _look(self, begin: int) -> None:
        self.now = self._begin = begin
        self._sequence, self._at = self._units_at(begin, begin + self._horizon)
        # `_sorted` groups the uses by unit, in order; `_next` is the index of each unit's next use in `_sorted`.
        self._sorted = self._at[np.argsort(self._sequence, kind="stable")]
        counts = np.bincount(self._sequence, minlength=self._units)
        self._ends = np.cumsum(counts)
        self._next = self._ends - counts
        self._done = 0

    def advance(self, now: int) -> None:
        """Advance to use `now`.

        A small step back is ignored, because workers can overtake each other.
        """
        if self.now - now > self._horizon // 4 or now - self._begin > self._horizon // 2:
            self._look(now)
        elif now > self.now:
            done = int(np.searchsorted(self._at, now))
            np.add.at(self._next, self._sequence[self._done : done], 1)
            self.now, self._done = now, done

    def ahead(self, skip: int = 0) -> Times:
        """Return the time from now to each unit's (skip + 1)-th next use.

        Returns:
            float (units,), in uses; NEVER if the use is beyond the horizon.
        """
        place = self._next + skip
        known = place < self._ends
        found = np.full(self._units, NEVER)
        found[known] = self._sorted[place[known]] - self.now
        return found

    def left(self) -> Numbers:
        """Return the number of known future uses of each unit, int64 (units,)."""
        found: Numbers = self._ends - self._next
        return found

    def upcoming(self, count: int) -> Numbers:
        """Return the units of the next `count` uses, in order."""
        return self._sequence[self._done : self._done + count]

    def of(self, unit: int, skip: int = 0) -> float:
        """Return one unit's entry of `ahead(skip)`."""
        place = int(self._next[unit]) + skip
        return float(self._sorted[place] - self.now) if place < self._ends[unit] else NEVER


class Deal:
    """The positions of each epoch that belong to some ranks.

    Each of these positions is one use; uses are counted over all epochs. The ranks get their samples as in
    `data.progress.steps`.

    Args:
        length: samples of an epoch.
        batch: samples of a step, on all ranks together.
        own: the ranks whose positions count.
        ranks: the number of all ranks.
    """

    def __init__(self, length: int, batch: int, own: Sequence[int], ranks: int) -> None:
        self._batch = batch
        offsets = np.arange(batch, dtype=np.int64)
        self._own = offsets[np.isin(offsets % ranks, np.asarray(own))]
        self._steps, rest = divmod(length, batch)
        self.epoch_uses = self._steps * len(self._own) + int((self._own < rest).sum())

    def use(self, epoch: int, samples: int) -> int:
        """Return the first use of the step that begins at sample `samples` of `epoch`."""
        return epoch * self.epoch_uses + min(samples // self._batch * len(self._own), self.epoch_uses)

    def places(self, begin: int, end: int) -> list[tuple[int, Numbers]]:
        """Return the positions of the uses `begin` to `end`, for each epoch."""
        found: list[tuple[int, Numbers]] = []
        while begin < end and self.epoch_uses:
            epoch, first = divmod(begin, self.epoch_uses)
            count = min(end - begin, self.epoch_uses - first)
            step, within = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._own))
            found.append((epoch, step * self._batch + self._own[within]))
            begin += count
        return found
