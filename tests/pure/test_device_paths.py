"""Which paths ranks on some hosts can take, and how they divide a tensor on the hierarchical path."""

import itertools

import pytest

from multiring._topology.device_paths import HostShares, device_paths


def hosts_of(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    ends = list(itertools.accumulate(sizes))
    return [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def test_paths() -> None:
    assert device_paths([(0,)]) == ("staged",)
    assert device_paths([(0, 1)]) == ("nccl", "staged")
    assert device_paths([(0,), (1,), (2,)]) == ("staged", "nccl")
    assert device_paths([(0, 1), (2, 3)]) == ("hierarchical", "nccl", "staged")
    assert device_paths([(0,), (1, 2, 3)]) == ("hierarchical", "nccl", "staged")


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2), (3, 1), (1, 3), (4, 3, 5), (2,)])
def test_the_steps_reduce_a_tensor(sizes: tuple[int, ...]) -> None:
    """Take the steps with plain numbers: every rank gets the average of all ranks."""
    hosts, ranks = hosts_of(sizes), sum(sizes)
    parts = [HostShares.of(hosts, rank) for rank in range(ranks)]
    for count in (1, 5, 64):
        padded = parts[0].padded(count, 4)
        assert {part.padded(count, 4) for part in parts} == {padded}
        assert padded >= count
        values = [[float(rank * 100 + place) for place in range(padded)] for rank in range(ranks)]
        shares: dict[int, list[float]] = {}
        for rank, part in enumerate(parts):
            counts = part.counts(padded)
            assert sum(counts) == padded
            assert part.own[part.place] == rank
            start = sum(counts[: part.place])
            own = range(start, start + counts[part.place])
            shares[rank] = [
                sum(values[each][place] for each in part.own) / len(part.own) * part.weight for place in own
            ]
            assert bool(part.between) == bool(shares[rank])
            if part.between:
                assert rank in part.between
                assert len(part.between) == len(hosts)
        reduced = {
            rank: [sum(column) / len(hosts) for column in zip(*(shares[each] for each in part.between), strict=True)]
            for rank, part in enumerate(parts)
        }
        for part in parts:
            found = [each for rank in part.own for each in reduced[rank]]
            assert found == pytest.approx([sum(column) / ranks for column in zip(*values, strict=True)])


def test_ranks_of_a_host_that_are_not_neighbours() -> None:
    part = HostShares.of([(3, 0), (1, 2)], 3)
    assert part == HostShares(own=(0, 3), place=1, between=(3, 2), shares=2, weight=1.0)
