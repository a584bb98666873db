"""What a tier of a cache keeps: by when it is needed next, where that is known; by when it was used last, to compare.

A unit is what is kept or let go of as a whole: a block, a sample. Nothing here reads, writes or waits.

Keeping what is needed soonest is optimal for units of one size (Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966, doi:10.1147/sj.52.0078), also where what is needed later than
all that is kept is passed by. For units of several sizes the optimum is hard to compute; among the choices at hand the
one that leaves the most bytes to the soonest uses is taken.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.data.eviction_search import searched
from multiring.errors import ArgumentError

NEVER = np.inf
# Uses that are looked up ahead: 16 MiB a reader. What is used later than that counts as never.
HORIZON = 1 << 20
_FEW = 32  # units that a tier holds: what a choice leaves unused is some per cent of it
_UNEQUAL = 0.8  # the least of them beside the largest

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]
# Begin and end of uses, counted over epochs, to the units that they need, and of which use each is: both in order.
UnitsAt = Callable[[int, int], tuple[Numbers, Numbers]]


class Policy(Protocol):
    """Decides what a tier of limited bytes keeps.

    Attributes:
        held: bool (units,), what it keeps now.
        used_bytes: of those.
    """

    held: NDArray[np.bool_]
    used_bytes: int

    def touch(self, unit: int) -> None:
        """Note that a unit is used."""
        ...

    def put(self, unit: int) -> None:
        """Note that a unit is there."""
        ...

    def drop(self, unit: int) -> None:
        """Note that a unit is gone."""
        ...

    def admit(
        self, unit: int, times: Times, own: float | None = None, upcoming: Sequence[int] = ()
    ) -> list[int] | None:
        """Take a unit in, and return what has to go for it; None where it is passed by."""
        ...


class _Held:
    """Which units a tier holds, within its bytes."""

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], capacity_bytes: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        if capacity_bytes < 0 or (self.sizes < 0).any():
            raise ArgumentError(f"a tier of {capacity_bytes} bytes, units of {self.sizes.min(initial=0)}: want >= 0")
        self.capacity_bytes = capacity_bytes
        self.held = np.zeros(len(self.sizes), dtype=np.bool_)
        self.used_bytes = 0

    def put(self, unit: int) -> None:
        """Note that a unit is there."""
        if not self.held[unit]:
            self.held[unit] = True
            self.used_bytes += int(self.sizes[unit])

    def drop(self, unit: int) -> None:
        """Note that a unit is gone."""
        if self.held[unit]:
            self.held[unit] = False
            self.used_bytes -= int(self.sizes[unit])

    def _swap(self, unit: int, victims: list[int]) -> list[int]:
        for each in victims:
            self.drop(each)
        self.put(unit)
        return victims


class NextUse(_Held):
    """Keeps what is needed soonest; passes by what is needed later than all that it would replace.

    Args:
        sizes: bytes of each unit.
        capacity_bytes: of the tier.

    Raises:
        ArgumentError: a negative size.
    """

    @property
    def is_coarse(self) -> bool:
        """Return whether it holds so few units, so unequal, that it matters which fit together."""
        sizes = self.sizes[self.sizes > 0]
        return len(sizes) > 0 and self.capacity_bytes < _FEW * sizes.mean() and sizes.min() < _UNEQUAL * sizes.max()

    def touch(self, unit: int) -> None:
        """Do nothing: the past does not matter."""

    def admit(
        self, unit: int, times: Times, own: float | None = None, upcoming: Sequence[int] = ()
    ) -> list[int] | None:
        """Take a unit in, and return what has to go for it; None where it is passed by.

        Args:
            unit: which.
            times: float (units,): when each is needed next, in any measure of time from now on; NEVER where unknown.
            own: what counts for the unit in place of its time, where the first uses only pay for fetching it.
            upcoming: the units of the next uses, where they are known: units that are few and unequal are chosen so.
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
    """Return which of some units go, so that `missing` bytes are free; None where they are not enough.

    The latest go first; those that turn out not to be needed for the room stay.
    """
    order = np.argsort(-times, kind="stable")
    freed = np.cumsum(sizes[order])
    count = int(np.searchsorted(freed, missing)) + 1
    if count > len(order):
        return None
    chosen = order[:count].tolist()
    spare = int(freed[count - 1]) - missing
    for each in reversed(chosen[:]):  # the soonest first
        if sizes[each] <= spare:
            chosen.remove(each)
            spare -= int(sizes[each])
    return [int(units[each]) for each in chosen]


class LeastRecent(_Held):
    """LRU, as most caches are: takes everything in, and lets go of what was used longest ago."""

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], capacity_bytes: int) -> None:
        super().__init__(sizes, capacity_bytes)
        self._recent: OrderedDict[int, None] = OrderedDict()

    def touch(self, unit: int) -> None:
        """Note that a unit is used."""
        if self.held[unit]:
            self._recent.move_to_end(unit)

    def admit(
        self,
        unit: int,
        times: Times,  # noqa: ARG002 -- a policy's signature
        own: float | None = None,  # noqa: ARG002
        upcoming: Sequence[int] = (),  # noqa: ARG002
    ) -> list[int] | None:
        """Take a unit in, and return what has to go for it; None where it is larger than the tier."""
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
    """When one reader uses each unit next, as far as it is known ahead.

    Args:
        units_at: gives what uses `begin` to `end` need.
        units: how many units there are.
        begin: the first use.
        horizon: uses that are looked up at a time.
    """

    def __init__(self, units_at: UnitsAt, units: int, begin: int = 0, horizon: int = HORIZON) -> None:
        self._units_at, self._units, self._horizon = units_at, units, horizon
        self._look(begin)

    def _look(self, begin: int) -> None:
        self.now = self._begin = begin
        self._sequence, self._at = self._units_at(begin, begin + self._horizon)
        # Uses by unit, each unit's in order: where its next one stands is a number for each unit.
        self._sorted = self._at[np.argsort(self._sequence, kind="stable")]
        counts = np.bincount(self._sequence, minlength=self._units)
        self._ends = np.cumsum(counts)
        self._next = self._ends - counts
        self._done = 0

    def advance(self, now: int) -> None:
        """Go on to where use `now` comes next; a little back is no change, as workers overtake each other."""
        if self.now - now > self._horizon // 4 or now - self._begin > self._horizon // 2:
            self._look(now)
        elif now > self.now:
            done = int(np.searchsorted(self._at, now))
            np.add.at(self._next, self._sequence[self._done : done], 1)
            self.now, self._done = now, done

    def ahead(self, skip: int = 0) -> Times:
        """Return how many uses from now on each unit is used for the (skip + 1)-th time; NEVER: beyond the horizon."""
        place = self._next + skip
        known = place < self._ends
        found = np.full(self._units, NEVER)
        found[known] = self._sorted[place[known]] - self.now
        return found

    def left(self) -> Numbers:
        """Return how many uses of each unit are known ahead."""
        found: Numbers = self._ends - self._next
        return found

    def upcoming(self, count: int) -> Numbers:
        """Return the units of the next uses."""
        return self._sequence[self._done : self._done + count]

    def of(self, unit: int, skip: int = 0) -> float:
        """Return the same of one unit."""
        place = int(self._next[unit]) + skip
        return float(self._sorted[place] - self.now) if place < self._ends[unit] else NEVER


class Deal:
    """Which places of each epoch some ranks have, as uses counted over epochs; see `data.progress.steps`.

    Args:
        length: of an epoch, in samples.
        batch: samples of a step, on all ranks together.
        own: the ranks.
        ranks: how many there are.
    """

    def __init__(self, length: int, batch: int, own: Sequence[int], ranks: int) -> None:
        self._batch = batch
        offsets = np.arange(batch, dtype=np.int64)
        self._own = offsets[np.isin(offsets % ranks, np.asarray(own))]
        self._steps, rest = divmod(length, batch)
        self.epoch_uses = self._steps * len(self._own) + int((self._own < rest).sum())

    def use(self, epoch: int, samples: int) -> int:
        """Return the first use of the step that begins at `samples` of an epoch."""
        return epoch * self.epoch_uses + min(samples // self._batch * len(self._own), self.epoch_uses)

    def places(self, begin: int, end: int) -> list[tuple[int, Numbers]]:
        """Return the places of some uses, by epoch."""
        found: list[tuple[int, Numbers]] = []
        while begin < end and self.epoch_uses:
            epoch, first = divmod(begin, self.epoch_uses)
            count = min(end - begin, self.epoch_uses - first)
            step, within = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self._own))
            found.append((epoch, step * self._batch + self._own[within]))
            begin += count
        return found
