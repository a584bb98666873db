"""The order of an epoch and its steps: equal for all ranks, and each sample occurs once."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring.data import ArrayDataset, Loader
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
    assert np.array_equal(of_second[:1_000], np.concatenate([second.samples(each, np.arange(500)) for each in (0, 1)]))
    of_first = found[found < 3_000]
    assert np.array_equal(of_first[:6_000], np.concatenate([first.samples(each, np.arange(3_000)) for each in (0, 1)]))


@given(
    sizes=st.lists(st.integers(50, 3_000), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 9),
    length=st.none() | st.integers(1, 6_000),
)
@settings(max_examples=25, deadline=None)
def test_a_mixture_goes_through_each_source_in_its_own_order_and_as_its_weight_says(
    sizes: list[int], data: st.DataObject, seed: int, length: int | None
) -> None:
    weights = data.draw(st.just(sizes) | st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    sources = [ExactOrder(size, number) for number, size in enumerate(sizes)]
    mixture = MixtureOrder(sources, weights, seed, length)
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    seen: list[list[int]] = [[] for _ in sizes]
    for epoch in range(3):
        found = mixture.samples(epoch, np.arange(mixture.length))
        assert np.array_equal(found[::-1], mixture.samples(epoch, np.arange(mixture.length)[::-1]))
        for number in range(len(sizes)):
            own = found[(found >= firsts[number]) & (found < firsts[number + 1])] - firsts[number]
            seen[number] += own.tolist()
            share = weights[number] / sum(weights) * mixture.length * (epoch + 1)
            assert abs(len(seen[number]) - share) < 2
        if length is None and weights == sizes:
            assert np.array_equal(np.sort(found), np.arange(sum(sizes))), (
                "some samples do not occur exactly once in the epoch"
            )
    for number, source in enumerate(sources):
        passes = -(-len(seen[number]) // sizes[number])
        own_order = [each for one in range(passes) for each in source.samples(one, np.arange(sizes[number])).tolist()]
        assert seen[number] == own_order[: len(seen[number])]


KINDS: list[tuple[str, Callable[..., Order], dict[str, Any], dict[str, Any]]] = [
    ("none", SequentialOrder, {"length": 9}, {"length": 10}),
    ("exact", ExactOrder, {"length": 9, "seed": 1}, {"length": 10, "seed": 2}),
    (
        "windowed",
        WindowedOrder,
        {"shard_samples": [4, 5], "window": 1, "seed": 1},
        {"shard_samples": [5, 4], "window": 2, "seed": 2},
    ),
    (
        "weighted",
        WeightedOrder,
        {"weights": [1.0, 2.0], "length": 9, "seed": 1},
        {"weights": [1.0, 2.5], "length": 10, "seed": 2},
    ),
    (
        "mixture",
        MixtureOrder,
        {"sources": [ExactOrder(3, 1)] * 2, "weights": [1, 2], "seed": 1, "length": 9, "numbered": [3, 3]},
        {
            "sources": [ExactOrder(3, 1), ExactOrder(3, 2)],
            "weights": [1, 3],
            "seed": 2,
            "length": 10,
            "numbered": [4, 3],
        },
    ),
]


@pytest.mark.parametrize(("kind", "make", "first", "others"), KINDS, ids=[each[0] for each in KINDS])
def test_a_digest_changes_with_everything_that_decides_an_order(
    kind: str, make: Callable[..., Order], first: dict[str, Any], others: dict[str, Any]
) -> None:
    digest = make(**first).digest
    assert make(**first).digest == digest, "the digest differs between equal orders"
    found = {digest, *(make(**{**first, name: value}).digest for name, value in others.items())}
    assert len(found) == 1 + len(others), kind
    assert first.keys() == others.keys() == {*inspect.signature(make).parameters}, "some arguments were not tried"


def test_no_two_kinds_of_order_have_one_digest() -> None:
    assert len({make(**first).digest for _, make, first, _ in KINDS}) == len(KINDS)


def test_a_state_says_of_which_order_it_is() -> None:
    progress = Progress(seed=1, digest="abc", order="def")
    state = replace(progress, samples=3).state_dict()
    assert progress.resumed(state, 10).samples == 3
    with pytest.raises(ArgumentError, match="the state has order def, but this data set has 123"):
        replace(progress, order="123").resumed(state, 10)
    with pytest.raises(ArgumentError, match="order is None"):
        progress.resumed({name: value for name, value in state.items() if name != "order"}, 10)
    older = {name: value for name, value in state.items() if name != "order"} | {"format": 1}
    assert progress.resumed(older, 10).samples == 3


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
        lambda: MixtureOrder([ExactOrder(1, 1)] * 2, [1, 0], 1),
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
                # The checkpoint does not include prefetched samples.
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
        ({"format": 3}, "format 3"),
        ({"seed": 2}, "seed 2"),
        ({"dataset": "abd"}, "data set abd"),
        ({"samples": 11}, "0 to 10 samples"),
        ({"samples": -1}, "0 to 10 samples"),
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


def test_an_epoch_without_its_incomplete_step_ends() -> None:
    loader = Loader(ArrayDataset({"x": np.arange(10)}, shuffle=False), 4, drop_last=True)
    for epoch in (0, 1):
        assert (loader.epoch, len(loader)) == (epoch, 2)
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.is_at_end
    loader.close()
