"""Choose the units that a cache evicts if it holds few units of different sizes: a beam search over the next uses.

The best choice depends on the time of each unit's next use and on which units fit into the cache together. Finding it
exactly is too expensive. The search keeps only the most promising cache contents at each step.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

LOOK = 40  # uses that the search looks ahead
_WIDTH = 16  # states that the search keeps at each step
_CANDIDATES = 6  # units considered for eviction at a step: the units that are needed latest
_TOGETHER = 3  # units evicted at a step, at most
_FAR = 1 << 60
_NEAR_WORTH = 0.5  # estimated worth of keeping a unit that is needed next, as a fraction of its bytes

State = frozenset[int]


@dataclass(slots=True)
class _Future:
    """The steps at which each unit is used, counted from the first use."""

    units: Sequence[int]
    at: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step, unit in enumerate(self.units):
            self.at.setdefault(unit, []).append(step)

    def next(self, unit: int, step: int) -> int:
        """Return the step of the unit's first use at or after `step`."""
        steps = self.at.get(unit, [])
        place = bisect_left(steps, step)
        return steps[place] if place < len(steps) else _FAR


def searched(
    held: Collection[int], unit: int, upcoming: Sequence[int], sizes: Sequence[int], capacity: int
) -> list[int] | None:
    """Return the held units to evict for `unit`, or None if `unit` is not kept.

    Args:
        held: the units in the cache.
        unit: the unit that is used now.
        upcoming: the units of the next uses, in order.
        sizes: the bytes of each unit.
        capacity: the bytes of the cache.
    """
    begin = frozenset(held)
    future = _Future([unit, *upcoming])
    # The cost of each state in fetched bytes, and the state after the first step towards it.
    states: dict[State, tuple[int, State]] = {begin: (0, begin)}
    for step, wanted in enumerate(future.units):
        found: dict[State, tuple[int, State]] = {}
        for state, (cost, first) in states.items():
            paid = cost if wanted in state else cost + sizes[wanted]
            for then in _choices(state, wanted, step, future, sizes, capacity):
                if then not in found or paid < found[then][0]:
                    found[then] = paid, (first if step else then)
        states = _best(found, step, future, sizes)
    _, chosen = min(states.values(), key=lambda each: each[0])
    return sorted(begin - chosen) if unit in chosen else None


def _choices(state: State, wanted: int, step: int, future: _Future, sizes: Sequence[int], capacity: int) -> list[State]:
    """Return the possible contents of the cache after a use of `wanted`."""
    if wanted in state or future.next(wanted, step + 1) == _FAR:
        return [state]
    missing = sum(sizes[each] for each in state) + sizes[wanted] - capacity
    if missing <= 0:
        return [state | {wanted}]
    found = [state]
    latest = sorted(state, key=lambda each: (-future.next(each, step + 1), each))[:_CANDIDATES]
    for count in range(1, _TOGETHER + 1):
        for gone in combinations(latest, count):
            freed = sum(sizes[each] for each in gone)
            # Skip choices that evict more units than needed.
            if freed >= missing > freed - min(sizes[each] for each in gone):
                found.append(state.difference(gone) | {wanted})
    return found


def _best(
    found: dict[State, tuple[int, State]], step: int, future: _Future, sizes: Sequence[int]
) -> dict[State, tuple[int, State]]:
    if len(found) <= _WIDTH:
        return found
    length = len(future.units)

    def expected(state: State) -> float:
        kept = sum(sizes[each] * max(0.0, 1 - (future.next(each, step + 1) - step) / length) for each in state)
        return found[state][0] - _NEAR_WORTH * kept

    return {state: found[state] for state in sorted(found, key=expected)[:_WIDTH]}
