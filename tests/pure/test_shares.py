"""The division of a global batch among ranks."""

import itertools

import pytest

from multiring.data import Share, merge_batches, seed_for, shard_batch
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
