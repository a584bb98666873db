"""What to let go of where units are few and of different sizes: some steps are looked ahead, the best choices kept.

Which units fit together matters then as much as when each is needed; to find the best choice is hard, so that of each
step the most promising states are followed on (a beam search).
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

LOOK = 40  # uses ahead
_WIDTH = 16  # states that are followed
_CANDIDATES = 6  # units that may go at a step, the latest
_TOGETHER = 3  # of those at a time
_FAR = 1 << 60
_NEAR_WORTH = 0.5  # of a unit's bytes, where it is needed at once

State = frozenset[int]


@dataclass(slots=True)
class _Future:
    """When units are used, in steps from the first."""

    units: Sequence[int]
    at: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step, unit in enumerate(self.units):
            self.at.setdefault(unit, []).append(step)

    def next(self, unit: int, step: int) -> int:
        """Return the first use from `step` on."""
        steps = self.at.get(unit, [])
        place = bisect_left(steps, step)
        return steps[place] if place < len(steps) else _FAR


def searched(
    held: Collection[int], unit: int, upcoming: Sequence[int], sizes: Sequence[int], capacity: int
) -> list[int] | None:
    """Return which of the `held` units go for `unit`, which is used now; None where it is better passed by.

    Args:
        held: what is kept.
        unit: what has come.
        upcoming: the units of the next uses.
        sizes: bytes of each unit.
        capacity: bytes that there are.
    """
    begin = frozenset(held)
    future = _Future([unit, *upcoming])
    states: dict[State, tuple[int, State]] = {begin: (0, begin)}  # what they cost, and where their first step led
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
    """Return what may be kept after a use."""
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
            # One that need not go stays.
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
