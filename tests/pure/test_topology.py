"""Hosts become grids: equal hosts two axes, one large host a near-square grid, unequal hosts one axis."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._topology import (
    SHM,
    TCP,
    Link,
    OwnRails,
    Rack,
    Topology,
    coordinates_of,
    grid_of,
    hosts_by_rack,
    neighbours,
    strides_of,
)
from multiring.errors import ArgumentError


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
    assert (topology.shm, topology.rails) == (SHM, (TCP,))


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


@pytest.mark.parametrize(
    ("local", "racks", "grid"),
    [
        (1, [[0, 1], [2, 3]], (2, 2)),
        (2, [[0, 1], [2, 3]], (2, 2, 2)),
        (2, [[0], [1]], (2, 2)),
        (3, [[0, 1]], (3, 2)),
        (2, [[0, 1, 2], [3]], (2, 4)),
        (1, [[0, 1, 2], [3]], (4,)),
        (1, [list(range(16)), list(range(16, 32))], (16, 2)),
        (1, [list(range(18))], (6, 3)),
    ],
)
def test_racks_are_an_axis_of_their_own(local: int, racks: list[list[int]], grid: tuple[int, ...]) -> None:
    hosts = _hosts(*[local] * sum(map(len, racks)))
    topology = Topology(hosts, racks=tuple(Rack(hosts=tuple(rack)) for rack in racks))
    assert grid_of(topology) == (grid, tuple(range(local * len(hosts))))


def test_a_rack_is_together_wherever_its_hosts_are_listed() -> None:
    racks = (Rack(hosts=(0, 2)), Rack(hosts=(1, 3)))
    topology = Topology(((0, 4), (1, 5), (2, 6), (3, 7)), racks=racks)
    assert hosts_by_rack(topology) == (0, 2, 1, 3)
    assert topology.rack_of() == (0, 1, 0, 1)
    assert grid_of(topology) == ((2, 2, 2), (0, 4, 2, 6, 1, 5, 3, 7))
    # Hosts or racks of unequal size are still ordered rack by rack.
    ragged = Topology(((0,), (1,), (2,)), racks=(Rack(hosts=(0, 2)), Rack(hosts=(1,))))
    assert grid_of(ragged) == ((3,), (0, 2, 1))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"racks": (Rack(hosts=(0,)),)}, "want each of 2 hosts once"),
        ({"racks": (Rack(hosts=(0, 1)), Rack(hosts=()))}, "no empty rack"),
        ({"racks": (Rack(hosts=(0, 1)), Rack(hosts=(1,)))}, "want each of 2 hosts once"),
        ({"rails": ()}, "want at least one"),
        ({"racks": (Rack(hosts=(0, 1), uplinks=(None, None)),)}, "one for each of 1 rails"),
        ({"own_rails": (OwnRails(host=0, rails=(TCP, TCP)),)}, "one for each of 1 rails"),
        ({"names": ("a",)}, r"names=\('a',\)"),
        ({"interfaces": ("eth0", "eth1")}, "interfaces="),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Topology(((0,), (1,)), **changes)


def _cluster() -> Topology:
    slow = OwnRails(host=2, rails=(replace(TCP, latency_s=1.0),))
    racks = (Rack(hosts=(0, 1), name="a"), Rack(hosts=(2, 3), name="b"))
    return Topology(_hosts(1, 1, 1, 1), racks=racks, own_rails=(slow,), names=("w", "x", "y", "z"))


def test_a_job_is_placed_on_the_hosts_it_has() -> None:
    # Rank 0 started on y. The two hosts of another domain are known by their short names.
    placed = _cluster().placed(((0, 2), (1, 3)), ["y", "x.cluster"])
    assert placed.hosts == ((0, 2), (1, 3))
    assert placed.racks == (Rack(hosts=(1,), name="a"), Rack(hosts=(0,), name="b"))
    assert placed.own_rails == (OwnRails(host=0, rails=(replace(TCP, latency_s=1.0),)),)
    assert (placed.rails_of(0)[0].latency_s, placed.rails_of(1)) == (1.0, (TCP,))
    assert placed.names == ("y", "x")
    # Ranks that play several hosts on one machine share its name.
    assert _cluster().placed(((0,), (1,)), ["y", "y"]).racks == (Rack(hosts=(0, 1), name="b"),)


def test_a_host_that_the_topology_does_not_know_is_named() -> None:
    with pytest.raises(ArgumentError, match="does not know host 'q': it has w, x, y, z; add the job's hosts"):
        _cluster().placed(((0,), (1,)), ["w", "q"])


def test_a_topology_without_names_fits_any_hosts() -> None:
    links = Topology(((0,),), rails=(TCP, SHM), interfaces=("a", "b"))
    assert links.placed(((0,), (1,)), ["p", "q"]) == replace(links, hosts=((0,), (1,)), names=("p", "q"))


def test_a_group_has_its_part_of_the_topology() -> None:
    part = _cluster().restricted([3, 0])
    assert part.hosts == ((1,), (0,))
    assert part.racks == (Rack(hosts=(0,), name="a"), Rack(hosts=(1,), name="b"))
    assert (part.own_rails, part.names) == ((), ("w", "z"))
    for ranks in ([], [0, 0], [4], [-1]):
        with pytest.raises(ArgumentError, match="want some of 0 to 3, each once"):
            _cluster().restricted(ranks)


def test_digests_differ_where_topologies_do() -> None:
    one = _cluster()
    assert one.digest() == _cluster().digest()
    assert len({one.digest(), replace(one, shm=TCP).digest(), replace(one, own_rails=()).digest()}) == 3


def test_the_hosts_decide_the_order_not_the_launcher() -> None:
    # Although ranks are dealt round-robin to the hosts, the first axis stays within a host.
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
