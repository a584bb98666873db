"""Cache tiers keep the units that are needed soonest, close to the optimum; jobs publish their future needs."""

from pathlib import Path

import numpy as np
import pytest

from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.keeping import Keeping
from multiring.data.eviction import NEVER, Deal, LeastRecent, NextUse, Uses
from multiring.data.eviction_search import LOOK, searched
from multiring.data.orders import ExactOrder, WeightedOrder
from multiring.data.permutation import Numbers
from multiring.data.progress import steps
from multiring.errors import ArgumentError


def uses_of(sequence: Numbers, units: int, horizon: int = 1 << 12) -> Uses:
    def units_at(begin: int, end: int) -> tuple[Numbers, Numbers]:
        found = sequence[begin:end]
        return found, np.arange(begin, begin + len(found))

    return Uses(units_at, units, horizon=horizon)


def least(sequence: Numbers, sizes: Numbers, capacity: int) -> float:
    """Return the fewest bytes to fetch, over all choices of units to keep at each step."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for unit in sequence.tolist():
        found: dict[frozenset[int], int] = {}
        for kept, cost in costs.items():
            paid = cost if unit in kept else cost + int(sizes[unit])
            has = sorted(kept | {unit})
            for chosen in range(1 << len(has)):
                then = frozenset(each for place, each in enumerate(has) if chosen >> place & 1)
                if sum(int(sizes[each]) for each in then) <= capacity:
                    found[then] = min(paid, found.get(then, paid))
        costs = found
    return min(costs.values())


def fetched(policy: NextUse | LeastRecent, sequence: Numbers, sizes: Numbers) -> int:
    uses = uses_of(sequence, len(sizes))
    total = 0
    for step, unit in enumerate(sequence.tolist()):
        uses.advance(step + 1)
        if policy.held[unit]:
            policy.touch(unit)
            continue
        total += int(sizes[unit])
        policy.admit(unit, uses.ahead(), None, uses.upcoming(LOOK).tolist())
        assert policy.used_bytes == int(sizes[policy.held].sum()) <= policy.capacity_bytes
    return total


@pytest.mark.parametrize("kind", ["weighted", "two jobs"])
def test_few_unequal_units_are_kept_nearly_as_well_as_they_can_be(kind: str) -> None:
    sizes = np.random.default_rng(3).integers(20, 100, 6)
    if kind == "weighted":
        sequence = WeightedOrder(np.arange(1.0, 7.0), 60, 1).samples(0, np.arange(60))
    else:
        jobs = [np.concatenate([ExactOrder(6, seed).samples(e, np.arange(6)) for e in range(5)]) for seed in (1, 2)]
        sequence = np.stack(jobs, 1).reshape(-1)
    capacity = int(0.5 * sizes.sum())
    total = int(sizes[sequence].sum())
    most = total - least(sequence, sizes, capacity)
    assert total - fetched(NextUse(sizes, capacity), sequence, sizes) >= 0.95 * most
    assert total - fetched(LeastRecent(sizes, capacity), sequence, sizes) < 0.9 * most, (
        "the sequence does not separate the two policies"
    )


def test_equal_units_are_kept_as_well_as_they_can_be() -> None:
    sizes = np.full(6, 10)
    sequence = np.random.default_rng(0).integers(0, 6, 50)
    assert fetched(NextUse(sizes, 30), sequence, sizes) == least(sequence, sizes, 30)


def test_what_is_needed_later_than_all_that_is_kept_is_passed_by() -> None:
    policy = NextUse([1, 1, 1], 2)
    times = np.array([1.0, 2.0, 3.0])
    assert policy.admit(0, times) == []
    assert policy.admit(1, times) == []
    assert policy.admit(2, times) is None
    assert policy.admit(2, np.array([1.0, 4.0, 3.0])) == [1]
    assert policy.admit(1, np.array([1.0, NEVER, 3.0])) is None
    with pytest.raises(ArgumentError, match="want sizes of 0 or more"):
        NextUse([1], -1)
    assert LeastRecent([5], 4).admit(0, times) is None
    assert searched([], 0, [0], [5], 4) is None


@pytest.mark.parametrize("batch", [4, 5, 30])
def test_uses_are_the_steps_of_the_ranks(batch: int) -> None:
    order = ExactOrder(23, 1)
    own, ranks = [1, 2], 3
    deal = Deal(23, batch, own, ranks)
    want = []
    for epoch in range(3):
        made = [list(steps(order, batch, epoch=epoch, rank=rank, ranks=ranks)) for rank in own]
        want += [
            (epoch, place)
            for step in zip(*made, strict=True)
            for place in sorted(np.concatenate([each.places for each in step]))
        ]
    found = [(epoch, place) for epoch, places in deal.places(0, len(want)) for place in places.tolist()]
    assert found == want
    if batch < 23:
        second = deal.use(1, batch)
        assert want[second] == next(each for each in want if each >= (1, batch))


def test_next_uses_are_right_wherever_the_reader_is() -> None:
    sequence = np.random.default_rng(0).integers(0, 5, 200)
    uses = uses_of(sequence, 6, horizon=40)
    for now in (0, 3, 17, 30, 29, 90, 2):
        uses.advance(now)
        at = uses.now
        for unit in range(6):
            later = np.flatnonzero(sequence[at : at + 10] == unit)
            assert not len(later) or uses.of(unit) == uses.ahead()[unit] == later[0]
        assert uses.ahead()[5] == NEVER


def test_a_job_lets_go_of_nothing_that_another_needs_soon(tmp_path: Path) -> None:
    caches = [BlockCache(tmp_path, 3 * 1024, print) for _ in range(2)]
    first, second = (Keeping(cache, "key", [1000] * 6, 0) for cache in caches)
    for number in range(3):
        assert first.takes(number, 0)
        first.keep(number, bytes(1000), on_disk=False)
    # The first job never needs units 0 to 2 again. The second job needs unit 2 next, and 0 and 1 later.
    first.expect(uses_of(np.array([3, 4, 3, 4]), 6))
    second.expect(uses_of(np.array([2, 5, 0, 1, 2]), 6))
    first.advance(0)
    first._look()
    first.keep(5, bytes(1000), on_disk=False)  # the first job never needs this unit
    first.keep(3, bytes(1000), on_disk=False)
    assert sorted(caches[0].numbers("key")) == [0, 2, 3], "the unit needed last was not evicted"
    for each in (first, second):
        each.close()
    assert not list((tmp_path / "readers").iterdir())


def test_what_another_says_is_believed_only_where_it_makes_sense(tmp_path: Path) -> None:
    keeping = Keeping(BlockCache(tmp_path, 3000, print), "key", [1000] * 4, 0)
    keeping.expect(uses_of(np.array([0, 1, 0]), 4))
    whole = next((tmp_path / "readers").iterdir()).read_bytes()
    for number, content in enumerate((b"", whole[:-1], whole + b"x", b"x" * len(whole), whole[:-4] + b"\xff" * 4)):
        (tmp_path / "readers" / f"key-{number}").write_bytes(content)
    keeping._look()
    assert keeping._others.is_alone
    (tmp_path / "readers" / "key-5").write_bytes(whole)
    keeping._look()
    assert not keeping._others.is_alone
