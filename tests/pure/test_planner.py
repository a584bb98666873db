"""The planner takes the cheapest of what the table has, the same on every rank."""

from dataclasses import replace

import pytest

from multiring.errors import ArgumentError, ScheduleError
from multiring.planner import candidates, choose
from multiring.planner.plan import links_of
from multiring.schedule import SUMS, Accumulation, Collective, check, price
from multiring.topology import SHM, TCP, Topology

SIZES = [0, 1000, 1 << 20, 1 << 28]


def _topology(*sizes: int) -> Topology:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return Topology(tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)))


TOPOLOGIES = [_topology(*sizes) for sizes in [(1,), (2,), (4,), (20,), (1, 1, 1), (4, 4), (2, 3), (3, 3, 3, 3)]]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: str([len(host) for host in topology.hosts]))
@pytest.mark.parametrize("collective", Collective)
def test_the_plan_is_the_cheapest_candidate_and_is_right(collective: Collective, topology: Topology) -> None:
    root = topology.ranks - 1 if collective is Collective.BROADCAST else 0
    for accumulation in Accumulation:
        for size_bytes in SIZES:
            plan = choose(collective, topology, size_bytes, accumulation, root)
            assert plan.schedule.collective is collective
            assert (plan.schedule.ranks, plan.schedule.root) == (topology.ranks, root)
            if collective in SUMS:
                assert plan.schedule.accumulation is accumulation
            check(plan.schedule)
            prices = [
                price(each, size_bytes, links_of(each, topology))
                for each in candidates(collective, topology, accumulation, root)
            ]
            assert plan.predicted_seconds == min(prices)
            assert choose(collective, topology, size_bytes, accumulation, root) == plan


@pytest.mark.parametrize(
    ("sizes", "engine"), [((1,), "shm"), ((4,), "shm"), ((1, 1), "tcp"), ((2, 2), "shm+tcp"), ((2, 1), "shm+tcp")]
)
def test_the_engine_follows_the_hosts(sizes: tuple[int, ...], engine: str) -> None:
    assert choose(Collective.ALL_REDUCE, _topology(*sizes), 100, Accumulation.SAME).engine == engine


def test_many_ranks_on_a_host_go_over_two_axes_where_latency_counts() -> None:
    plan = choose(Collective.ALL_REDUCE, _topology(64), 1000, Accumulation.WIDE)
    assert (plan.schedule.algorithm, plan.schedule.grid) == ("direct", (8, 8))


def test_an_average_of_narrow_integers_stays_on_one_axis() -> None:
    for size_bytes in SIZES:
        plan = choose(Collective.ALL_REDUCE, _topology(64), size_bytes, Accumulation.ONCE)
        assert plan.schedule.grid == (64,)


def test_large_sums_between_hosts_leave_each_host_once() -> None:
    plan = choose(Collective.ALL_REDUCE, _topology(4, 4, 4), 1 << 28, Accumulation.WIDE)
    assert plan.schedule.grid == (4, 3)


def test_a_root_on_any_rank_is_kept() -> None:
    for root in range(6):
        assert choose(Collective.BROADCAST, _topology(3, 3), 1 << 20, Accumulation.SAME, root).schedule.root == root


def test_ranks_of_a_host_share_its_way_out() -> None:
    topology = _topology(4, 4)
    found = {
        (schedule.algorithm, schedule.grid): links_of(schedule, topology)
        for schedule in candidates(Collective.ALL_REDUCE, topology, Accumulation.SAME)
    }
    shared = replace(TCP, bandwidth_bytes_per_s=TCP.bandwidth_bytes_per_s / 4)
    assert found["direct", (8,)] == [shared]  # every rank sends to the other host
    assert found["ring", (8,)] == [TCP]  # one rank does
    assert found["direct", (4, 2)] == found["ring", (4, 2)] == [SHM, shared]
    broadcasts = {
        (schedule.algorithm, schedule.grid): links_of(schedule, topology)
        for schedule in candidates(Collective.BROADCAST, topology, Accumulation.SAME, root=5)
    }
    assert broadcasts["direct", (4, 2)] == [SHM, TCP]  # only the root sends between hosts
    assert broadcasts["direct", (8,)] == [TCP]


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ArgumentError, match="size_bytes=-1"):
        choose(Collective.ALL_REDUCE, _topology(2), -1, Accumulation.SAME)
    with pytest.raises(ScheduleError, match="root=2"):
        choose(Collective.BROADCAST, _topology(2), 1, Accumulation.SAME, root=2)
    with pytest.raises(ScheduleError, match="root=1"):
        choose(Collective.ALL_REDUCE, _topology(2), 1, Accumulation.SAME, root=1)
