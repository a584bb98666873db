"""The samples of an epoch over resets: none is lost, and repeats only fill up the last batches."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.data import ElasticOrder
from multiring.errors import ArgumentError

# The number of ranks until the next reset, the number of batches that each rank takes, and whether it commits.
Phase = tuple[int, int, bool]
PHASES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6)


def deal(count: int, ranks: int, state: dict[str, object] | None = None, *, shuffle: bool = True) -> list[ElasticOrder]:
    orders = []
    for rank in range(ranks):
        order = ElasticOrder(range(count), shuffle, 3, lambda rank=rank: (rank, ranks))  # type: ignore[misc]
        if state is not None:
            order.load_state_dict(state)
        orders.append(order)
    return orders


def done_in(order: ElasticOrder) -> dict[str, object]:
    """Return a state without the digest of its order."""
    return {name: value for name, value in order.state_dict().items() if name != "order"}


def together(orders: Sequence[ElasticOrder]) -> dict[str, object]:
    """Return the merged state of all ranks' orders."""
    states = [order.state_dict() for order in orders]
    recorded = [state["processed_indices"] for state in states if "processed_indices" in state]
    if not recorded:
        return states[0]
    return states[0] | {"processed_indices": sorted({index for each in recorded for index in each})}


def expect_each_once(done: Counter[int], count: int, last_ranks: int) -> None:
    assert set(done) == set(range(count))
    again = done.total() - count
    assert 0 <= again < last_ranks
    assert max(done.values(), default=1) <= 1 + again


@given(st.integers(0, 40), PHASES, st.integers(1, 3))
def test_batches_of_all_ranks(count: int, phases: list[Phase], batch: int) -> None:
    done: Counter[int] = Counter()
    state = deal(count, 1)[0].state_dict()
    for ranks, batches, is_committed in [*phases, (2, count, True)]:
        orders = deal(count, ranks, state)
        left = len(orders[0].remaining_indices)
        assert left == count - min(orders[0].processed_num, count)
        assert {len(order) for order in orders} == {-(-left // ranks)}
        taken: Counter[int] = Counter()
        for number in range(min(batches, -(-len(orders[0]) // batch))):
            for order in orders:
                samples = order.get_indices(number, batch)
                taken.update(samples)
                order.record_batch(number, len(samples))
        assert len({order.processed_num for order in orders}) == 1
        if is_committed:
            # Samples that were repeated to fill up come last, and only once.
            done += taken
            state = orders[0].state_dict()
    expect_each_once(done, count, 5)


@given(st.integers(0, 40), PHASES, st.integers(1, 3), st.integers(0, 99))
def test_samples_one_by_one(count: int, phases: list[Phase], batch: int, seed: int) -> None:
    """Each rank takes its own number of batches."""
    generator = random.Random(seed)  # noqa: S311 -- no secret
    done: set[int] = set()
    state = deal(count, 1)[0].state_dict()
    for ranks, batches, is_committed in [*phases, (3, count, True)]:
        orders = deal(count, ranks, state)
        assert set(orders[0].remaining_indices) == set(range(count)) - done
        taken: Counter[int] = Counter()
        for order in orders:
            most = batches if batches == count else generator.randint(0, batches)
            order.record_indices([])
            for number in range(min(most, -(-len(order) // batch))):
                samples = order.get_indices(number, batch)
                taken.update(samples)
                order.record_indices(samples)
        assert not done & set(taken)
        assert taken.total() - len(taken) < ranks
        if is_committed:
            done |= set(taken)
            state = together(orders)
    assert done == set(range(count))


@given(st.integers(1, 30), st.integers(1, 4), st.data())
def test_both_ways_of_recording(count: int, ranks: int, data: st.DataObject) -> None:
    first = deal(count, ranks)
    some = data.draw(st.sets(st.integers(0, count - 1)))
    for order in first:
        order.record_indices(some)
    second = deal(count, ranks, together(first))
    batches = data.draw(st.integers(0, count))
    for order in second:
        for number in range(batches):
            order.record_batch(number, 1)
    counted = second[0].remaining_indices[: batches * ranks]
    third = deal(count, ranks, together(second))[0]
    assert set(third.remaining_indices) == set(range(count)) - some - set(counted)


def test_order_of_an_epoch() -> None:
    order = deal(10, 1)[0]
    wanted = list(range(10))
    random.Random(3).shuffle(wanted)  # noqa: S311 -- no secret
    assert list(order) == wanted  # Horovod's order
    order.set_epoch(1)
    assert list(order) != wanted
    assert sorted(order) == list(range(10))
    assert list(deal(4, 1, shuffle=False)[0]) == [0, 1, 2, 3]


def test_shares_of_ranks() -> None:
    assert [list(order) for order in deal(7, 3, shuffle=False)] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    # Fewer samples than ranks.
    assert [list(order) for order in deal(1, 3, shuffle=False)] == [[0], [0], [0]]
    assert [list(order) for order in deal(0, 3, shuffle=False)] == [[], [], []]


def test_a_new_epoch_forgets_the_old_one() -> None:
    order = deal(8, 2)[0]
    order.record_batch(0, 2)
    order.record_indices([order.indices[3]])
    assert done_in(order) == {"epoch": 0, "processed_num": 4, "processed_indices": [order.indices[3]]}
    assert len(order) == 4
    order.reset()
    assert len(order) == 2
    order.set_epoch(1)
    assert done_in(order) == {"epoch": 1, "processed_num": 0, "processed_indices": []}
    assert len(order) == 4


def test_states_of_horovod() -> None:
    order = deal(8, 2)[1]
    order.load_state_dict({"epoch": 2, "processed_num": 100})
    assert (order.epoch, order.processed_num, len(order)) == (2, 8, 0)


def test_bad_arguments() -> None:
    order = deal(8, 2)[0]
    with pytest.raises(ArgumentError, match="sample 8 of a dataset of 8: want 0 to 7"):
        order.record_indices([1, 8])
    for state in ({"processed_num": 1}, {"epoch": 1, "processed_num": -1}):
        with pytest.raises(ArgumentError, match="want its epoch, and processed_num >= 0"):
            order.load_state_dict(state)


@pytest.mark.parametrize(("count", "shuffle", "seed"), [(9, True, 3), (8, False, 3), (8, True, 4)])
def test_a_state_of_another_order_is_refused(count: int, shuffle: bool, seed: int) -> None:  # noqa: FBT001
    state = ElasticOrder(range(8), shuffle=True, seed=3, place=lambda: (0, 1)).state_dict()
    other = ElasticOrder(range(count), shuffle, seed, lambda: (0, 1))
    with pytest.raises(ArgumentError, match="the state has the order"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name != "order"})  # like Horovod's
