"""The division of a global batch among ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring.data import ArrayDataset, Share, merge_batches, seed_for, shard_batch
from multiring.data.progress import steps, steps_by_counts
from multiring.data.shares import positions_by_counts
from multiring.errors import ArgumentError


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 14])
def test_parts_are_the_batch(count: int, ranks: int) -> None:
    batch = list(range(100, 100 + count))
    parts = [shard_batch(batch, rank, ranks) for rank in range(ranks)]
    assert sorted(itertools.chain(*parts)) == batch
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) == count // ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 14])
def test_parts_of_equal_sizes_are_those_of_equal_ranks(count: int, ranks: int) -> None:
    batch = list(range(count))
    counts = [len(shard_batch(batch, rank, ranks)) for rank in range(ranks)]
    for rank in range(ranks):
        assert positions_by_counts(counts, rank).tolist() == shard_batch(batch, rank, ranks)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_parts_by_counts_are_the_batch_and_spread_over_it(counts: list[int]) -> None:
    parts = [positions_by_counts(counts, rank).tolist() for rank in range(len(counts))]
    assert [len(part) for part in parts] == counts
    assert sorted(itertools.chain(*parts)) == list(range(sum(counts)))
    for part in parts:
        # The middle of an even spread, and at most half a place of each rank beside it.
        middle = sum(part) / max(1, len(part))
        assert not part or abs(middle - (sum(counts) - 1) / 2) <= len(counts) / 2


def test_steps_by_counts() -> None:
    order = ArrayDataset({"x": np.arange(22)}, seed=3).order
    equal = [list(steps(order, 5, epoch=1, begin=4, rank=rank, ranks=2)) for rank in range(2)]
    uneven = {5: (1, 4), 3: (0, 3)}
    for rank in range(2):
        alike = steps_by_counts(order, 5, lambda n: (n - n // 2, n // 2), epoch=1, begin=4, rank=rank)
        for one, other in zip(alike, equal[rank], strict=True):
            assert (one.begin, one.end, one.share) == (other.begin, other.end, other.share)
            assert one.samples.tolist() == other.samples.tolist()
    made = [list(steps_by_counts(order, 5, uneven.__getitem__, epoch=1, begin=4, rank=rank)) for rank in range(2)]
    for one, other, first, second in zip(*made, *equal, strict=True):
        assert (one.share.samples, other.share.samples) == uneven[one.share.total]
        assert one.share.least == other.share.least == min(uneven[one.share.total])
        found = [*one.samples.tolist(), *other.samples.tolist()]
        assert sorted(found) == sorted([*first.samples.tolist(), *second.samples.tolist()])
        assert (one.begin, one.end) == (first.begin, first.end)


@pytest.mark.parametrize("samples", [(3, 3), (3, 2), (1, 0, 0), (5, 1, 4), (2, 2, 2)])
def test_weighted_means_average_to_the_mean(samples: tuple[int, ...]) -> None:
    total = sum(samples)
    shares = [Share(samples=each, total=total, ranks=len(samples), least=min(samples)) for each in samples]
    values = [float(value * value) for value in range(total)]
    parts = [values[sum(samples[:rank]) : sum(samples[: rank + 1])] for rank in range(len(samples))]
    means = [sum(part) / len(part) if part else 123.0 for part in parts]
    average = sum(share.weight * mean for share, mean in zip(shares, means, strict=True)) / len(samples)
    assert average == pytest.approx(sum(values) / total)


def test_even_parts_weigh_exactly_one() -> None:
    assert Share(samples=7, total=49, ranks=7, least=7).weight == 1.0


def test_batch_without_samples() -> None:
    with pytest.raises(ArgumentError, match="a batch of 0 samples: want at least one"):
        Share(samples=0, total=0, ranks=2, least=0)


def test_joined_batches() -> None:
    batches = [[1, 2], [3], [4, 5], [6], [7]]
    assert list(merge_batches(batches, 1)) == batches
    assert list(merge_batches(batches, 2)) == [[1, 2, 3], [4, 5, 6], [7]]
    assert list(merge_batches(batches, 2, drops_last=True)) == [[1, 2, 3], [4, 5, 6]]
    assert list(itertools.islice(merge_batches(itertools.repeat([0]), 3), 2)) == [[0, 0, 0], [0, 0, 0]]


def test_seeds_of_ranks_differ() -> None:
    seeds = {seed_for(seed, rank) for seed in range(20) for rank in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(5, 3) == seed_for(5, 3)
