"""Orders of an epoch, and the steps that are cut from them: the same whoever asks, each sample once."""

import json

import numpy as np
import pytest

from multiring.data.orders import ExactOrder, MixtureOrder, Order, SequentialOrder, WeightedOrder, WindowedOrder
from multiring.data.progress import Progress, steps
from multiring.errors import ArgumentError

COUNTS = [5, 1, 8, 3, 3, 9, 2, 4]
ONCE: list[Order] = [
    SequentialOrder(35),
    ExactOrder(35, 3),
    ExactOrder(9_001, 3),
    WindowedOrder(COUNTS, 1, 3),
    WindowedOrder(COUNTS, 3, 3),
    WindowedOrder(COUNTS, 99, 3),
    WindowedOrder([7_000, 5_000, 6_000], 2, 3),
]
ALL: list[Order] = [*ONCE, WeightedOrder(range(35), 50, 3), MixtureOrder([*ONCE[1:3]], [3, 1], 3)]


@pytest.mark.parametrize("order", ONCE, ids=lambda each: f"{type(each).__name__}{each.length}")
def test_an_epoch_has_each_sample_once(order: Order) -> None:
    for epoch in (0, 1):
        found = order.samples(epoch, np.arange(order.length))
        assert np.array_equal(np.sort(found), np.arange(order.length))
        back = getattr(order, "places_of")(epoch, found)  # noqa: B009 -- no part of every order
        assert np.array_equal(back, np.arange(order.length))


@pytest.mark.parametrize("order", ALL, ids=lambda each: f"{type(each).__name__}{each.length}")
def test_a_piece_is_what_it_is_in_the_whole(order: Order) -> None:
    whole = order.samples(1, np.arange(order.length))
    for ranks in (1, 3):
        for rank in range(ranks):
            places = np.arange(rank, order.length, ranks)
            assert np.array_equal(order.samples(1, places), whole[rank::ranks])
    with pytest.raises(ArgumentError, match=f"want 0 to {order.length - 1}"):
        order.samples(0, [order.length])


@pytest.mark.parametrize("order", ALL[1:], ids=lambda each: f"{type(each).__name__}{each.length}")
def test_epochs_differ(order: Order) -> None:
    places = np.arange(order.length)
    assert not np.array_equal(order.samples(0, places), order.samples(1, places))


def test_a_window_is_all_that_is_in_use_at_a_time() -> None:
    order = WindowedOrder(COUNTS, 3, 7)
    shard_of = np.repeat(np.arange(len(COUNTS)), COUNTS)
    taken = shard_of[order.samples(4, np.arange(order.length))]
    turns = order.shards(4).tolist()
    begin = 0
    for first in range(0, len(turns), 3):
        window = turns[first : first + 3]
        count = sum(COUNTS[each] for each in window)
        assert set(taken[begin : begin + count]) == set(window)
        begin += count


def test_weights_are_kept_in_the_long_run() -> None:
    weights = np.array([0, 1, 3, 0, 6])
    found = WeightedOrder(weights, 100_000, 1).samples(0, np.arange(100_000))
    assert np.abs(np.bincount(found, minlength=5) / 100_000 - weights / 10).max() < 0.01
    assert not {0, 3} & set(found.tolist())


def test_a_mixture_goes_through_each_source_as_its_weight_says() -> None:
    first, second = ExactOrder(3_000, 1), ExactOrder(500, 2)
    mixture = MixtureOrder([first, second], [3, 1], seed=5, length=4_096)
    found = np.concatenate([mixture.samples(epoch, np.arange(4_096)) for epoch in range(2)])
    of_second = found[found >= 3_000] - 3_000
    assert [int((each >= 3_000).sum()) for each in np.split(found, 2)] == [1_024, 1_024]
    # Each pass of a source has each of its samples once, in some order of draws within a block of 4,096.
    assert np.bincount(of_second, minlength=500).min() >= 4
    assert np.bincount(found[found < 3_000], minlength=3_000).min() >= 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequentialOrder(0),
        lambda: ExactOrder(0, 1),
        lambda: WindowedOrder([], 1, 1),
        lambda: WindowedOrder([1], 0, 1),
        lambda: WindowedOrder([1, 0], 1, 1),
        lambda: WeightedOrder([0, 0], 1, 1),
        lambda: WeightedOrder([1, -1], 1, 1),
        lambda: WeightedOrder([1, float("nan")], 1, 1),
        lambda: MixtureOrder([], [], 1),
        lambda: MixtureOrder([ExactOrder(1, 1)], [1, 2], 1),
        lambda: MixtureOrder([ExactOrder(1, 1)] * 2, [1, 1e-9], 1),
    ],
)
def test_an_order_of_nothing_is_refused(make: "type[Order]") -> None:
    with pytest.raises(ArgumentError, match=r"want|draws"):
        make()


@pytest.mark.parametrize("batch", [1, 7, 64, 1_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_step_is_a_piece_of_the_order_whoever_shares_it(batch: int, ranks: int) -> None:
    order = ExactOrder(211, 2)
    whole = order.samples(3, np.arange(211))
    by_rank = [list(steps(order, batch, epoch=3, rank=rank, ranks=ranks)) for rank in range(ranks)]
    for step in zip(*by_rank, strict=True):
        begin, end = step[0].begin, step[0].end
        assert {(each.begin, each.end) for each in step} == {(begin, end)}
        for rank, each in enumerate(step):
            assert np.array_equal(each.samples, whole[begin:end][rank::ranks])
            assert each.share.samples == len(each.samples)
        assert sum(each.share.weight for each in step) == pytest.approx(ranks)
    assert by_rank[0][-1].end == 211


def test_fifty_times_stopped_and_resumed_on_other_ranks_each_sample_comes_once() -> None:
    order = ExactOrder(10_007, 9)
    generator = np.random.default_rng(0)
    for is_global in (True, False):
        seen: list[int] = []
        progress = Progress(seed=9, digest="d")
        for _ in range(50):
            ranks = int(generator.integers(1, 9))
            batch = 24 if is_global else 5 * ranks
            for count in range(int(generator.integers(1, 12))):
                shares = [
                    next(steps(order, batch, begin=progress.samples, rank=rank, ranks=ranks), None)
                    for rank in range(ranks)
                ]
                if shares[0] is None:
                    break
                seen += [number for each in shares if each for number in each.samples.tolist()]
                # What was prefetched beyond it is in no checkpoint.
                state = json.loads(json.dumps(Progress(seed=9, samples=shares[0].end, digest="d").state_dict()))
                assert len(json.dumps(state)) < 120
                progress = Progress(seed=9, digest="d").resumed(state, order.length)
                assert count < 12
        seen += [n for step in steps(order, 24, begin=progress.samples) for n in step.samples.tolist()]
        assert sorted(seen) == list(range(10_007))


GOOD = Progress(seed=1, epoch=2, samples=3, digest="abc").state_dict()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "format 2"),
        ({"seed": 2}, "seed 2"),
        ({"dataset": "abd"}, "data set abd"),
        ({"samples": 11}, "want 0 to 10"),
        ({"samples": -1}, "want 0 to 10"),
        ({"epoch": "1"}, "epoch is '1'"),
        ({"epoch": None}, "epoch is None"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, object], text: str) -> None:
    progress = Progress(seed=1, digest="abc")
    assert progress.resumed(GOOD, 10).samples == 3
    with pytest.raises(ArgumentError, match=text):
        progress.resumed({**GOOD, **change}, 10)


def test_steps_of_nobody_are_refused() -> None:
    with pytest.raises(ArgumentError, match="rank 2 of 2"):
        next(steps(ExactOrder(5, 1), 2, rank=2, ranks=2))
