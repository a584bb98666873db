"""Hosts become grids: rectangles two axes, one crowded host a near-square, ragged hosts one axis."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.errors import ArgumentError
from multiring.topology import SHM, TCP, Link, Topology, coordinates_of, grid_of, neighbours, strides_of


def _hosts(*sizes: int) -> tuple[tuple[int, ...], ...]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


@pytest.mark.parametrize("hosts", [(), ((),), ((0,), ()), ((1,),), ((0, 0),), ((0,), (2,)), ((0, 1), (1,)), ((-1, 0),)])
def test_hosts_that_do_not_hold_every_rank_once_are_refused(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ArgumentError, match=r"want every rank 0, 1, \.\.\. once"):
        Topology(hosts)


def test_a_topology_knows_where_ranks_are() -> None:
    topology = Topology(((2, 0), (1, 3), (4,)))
    assert topology.ranks == 5
    assert topology.host_of() == (0, 1, 0, 1, 2)
    assert (topology.shm, topology.tcp) == (SHM, TCP)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("latency_s", -1e-6, "latency_s=-1e-06: want a number >= 0"),
        ("overhead_s", math.nan, "overhead_s=nan: want a number >= 0"),
        ("bandwidth_bytes_per_s", 0, "bandwidth_bytes_per_s=0: want a number > 0"),
        ("reduce_bytes_per_s", -1, "reduce_bytes_per_s=-1: want a number > 0"),
    ],
)
def test_impossible_links_are_refused(name: str, value: float, match: str) -> None:
    good = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth_bytes_per_s": 1.0, "reduce_bytes_per_s": math.inf}
    Link(**good)
    with pytest.raises(ArgumentError, match=match):
        Link(**{**good, name: value})


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        ((1,), (1,)),
        ((16,), (16,)),
        ((17,), (17,)),
        ((18,), (6, 3)),
        ((24,), (6, 4)),
        ((64,), (8, 8)),
        ((1, 1, 1), (3,)),
        ((1,) * 64, (8, 8)),
        ((4, 4), (4, 2)),
        ((32,) * 32, (32, 32)),
        ((2, 3), (5,)),
        ((20, 1), (21,)),
    ],
)
def test_hosts_become_grids(sizes: tuple[int, ...], grid: tuple[int, ...]) -> None:
    assert grid_of(Topology(_hosts(*sizes))) == (grid, tuple(range(sum(sizes))))


def test_the_hosts_decide_the_order_not_the_launcher() -> None:
    # Ranks dealt round to the hosts: the first axis still stays within a host.
    grid, order = grid_of(Topology(((0, 2, 4), (1, 3, 5))))
    assert (grid, order) == ((3, 2), (0, 2, 4, 1, 3, 5))
    assert neighbours(grid, order, 0) == (1, 2, 4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_positions_and_coordinates_agree(sizes: list[int]) -> None:
    positions = range(math.prod(sizes))
    found = [coordinates_of(sizes, position) for position in positions]
    assert len(set(found)) == len(positions)
    strides = strides_of(sizes)
    assert [sum(at * stride for at, stride in zip(each, strides, strict=True)) for each in found] == list(positions)


@pytest.mark.parametrize(
    ("grid", "rank", "want"),
    [
        ((1,), 0, ()),
        ((2,), 0, (1,)),
        ((5,), 0, (1, 4)),
        ((8, 8), 0, (1, 7, 8, 56)),
        ((8, 8), 27, (19, 26, 28, 35)),
        ((2, 2, 2), 7, (3, 5, 6)),
        ((3, 1), 1, (0, 2)),
    ],
)
def test_a_rank_has_two_neighbours_on_each_axis(grid: tuple[int, ...], rank: int, want: tuple[int, ...]) -> None:
    assert neighbours(grid, range(math.prod(grid)), rank) == want


def test_neighbours_know_each_other() -> None:
    grid, order = grid_of(Topology(_hosts(4, 4, 4)))
    near = {rank: neighbours(grid, order, rank) for rank in range(12)}
    assert all(rank in near[other] for rank, others in near.items() for other in others)


@pytest.mark.parametrize(("grid", "order", "rank"), [((2, 2), (0, 1, 2, 3), 4), ((2, 2), (0, 1), 0), ((2,), (1, 2), 0)])
def test_neighbours_of_nobody_are_refused(grid: tuple[int, ...], order: tuple[int, ...], rank: int) -> None:
    with pytest.raises(ArgumentError, match=f"rank {rank} on grid"):
        neighbours(grid, order, rank)
