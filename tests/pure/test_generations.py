"""The membership of a job is a value, from which the next generation's membership is derived."""

import pytest

from multiring._runtime.job.membership import Endpoint, Membership
from multiring._topology import Topology
from multiring.errors import ArgumentError


def _membership(rank: int) -> Membership:
    topology = Topology(((0, 1), (2, 3), (4,)), names=("a", "b", "c"))
    endpoints = tuple(Endpoint(number, "aabbc"[number]) for number in range(5))
    return Membership(job="job", number=0, rank=rank, endpoints=endpoints, topology=topology)


def test_the_first_generation_is_what_ranks_are_called_by() -> None:
    first = _membership(2)
    assert (first.size, first.ids, first.local_ranks, first.key) == (5, (0, 1, 2, 3, 4), (2, 3), "job")


def test_a_rank_fewer() -> None:
    second = _membership(3).without({2})
    assert (second.number, second.rank, second.size, second.ids) == (1, 2, 4, (0, 1, 3, 4))
    assert second.topology.hosts == ((0, 1), (2,), (3,))
    assert second.local_ranks == (2,)
    assert [each.host for each in second.endpoints] == ["a", "a", "b", "c"]
    third = second.without({0, 3})
    assert (third.number, third.rank, third.ids, third.topology.names) == (2, 1, (1, 3), ("a", "b"))
    assert len({_membership(3).key, second.key, third.key}) == 3
    # All survivors derive the same membership, except for their own rank.
    others = [_membership(rank).without({2}).without({0, 3}) for rank in (1, 3)]
    assert [each.rank for each in others] == [0, 1]
    assert others[0].endpoints == others[1].endpoints == third.endpoints


@pytest.mark.parametrize("lost", [{2}, {5}, {-1, 0}])
def test_who_cannot_be_lost(lost: set[int]) -> None:
    with pytest.raises(ArgumentError, match=r"want ranks below 5 other than this rank, 2"):
        _membership(2).without(lost)


def test_a_membership_fits_its_topology() -> None:
    with pytest.raises(ArgumentError, match="rank 2 of 2 endpoints on a topology of 2 ranks: want a rank below"):
        Membership(
            job="job",
            number=0,
            rank=2,
            endpoints=(Endpoint(0, "a"), Endpoint(1, "a")),
            topology=Topology(((0, 1),)),
        )
