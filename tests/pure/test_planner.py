"""The planner chooses the cheapest algorithm of the table, and the same one on every rank."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._collectives import build
from multiring._native import MOST_LANES, NOTE_BYTES
from multiring._schedule import SUMS, Accumulation, Collective, Frame, Schedule, Way, Wire, check, price, timing
from multiring._topology import SHM, TCP, Link, OwnRails, Rack, Topology
from multiring.errors import ArgumentError, ScheduleError
from multiring.planner import Plan, Task, candidates, cheapest, count_of_plans, ranked, refuse_unfit, ways_of
from multiring.planner.candidates import grids_of, proportion, shares_of
from multiring.planner.plan import NOTES_BYTES

SIZES = [0, 1000, 1 << 20, 1 << 28]
GIGABIT = replace(TCP, bandwidth_bytes_per_s=119e6)


def _topology(*sizes: int, **parts: Any) -> Topology:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    hosts = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    return Topology(hosts, **parts)


def _racks(*racks: list[int], uplink: Link | None = None) -> tuple[Rack, ...]:
    return tuple(Rack(hosts=tuple(hosts), uplinks=() if uplink is None else (uplink,)) for hosts in racks)


def _all_reduce(topology: Topology, size_bytes: int, accumulation: Accumulation = Accumulation.SAME) -> Plan:
    return cheapest(Task(collective=Collective.ALL_REDUCE, size_bytes=size_bytes, accumulation=accumulation), topology)


TOPOLOGIES = [_topology(*sizes) for sizes in [(1,), (2,), (4,), (20,), (1, 1, 1), (4, 4), (2, 3), (3, 3, 3, 3)]]
TOPOLOGIES.append(_topology(2, 2, 2, 2, racks=_racks([0, 1], [2, 3], uplink=TCP)))
TOPOLOGIES.append(_topology(1, 1, 1, rails=(TCP, GIGABIT)))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: str([len(host) for host in topology.hosts]))
@pytest.mark.parametrize("collective", Collective)
def test_the_plan_is_the_cheapest_candidate_and_is_right(collective: Collective, topology: Topology) -> None:
    root = topology.ranks - 1 if collective is Collective.BROADCAST else 0
    for accumulation in Accumulation:
        for size_bytes in SIZES:
            task = Task(collective=collective, size_bytes=size_bytes, accumulation=accumulation, root=root)
            plan = cheapest(task, topology)
            assert plan.schedule.collective is collective
            assert (plan.schedule.ranks, plan.schedule.root) == (topology.ranks, root)
            if collective in SUMS:
                assert plan.schedule.accumulation is accumulation
            check(plan.schedule)
            every = ranked(task, topology)
            assert every[0] == plan
            assert len(every) == count_of_plans(task, topology)
            # Fewer plans are the first of all, although most of the others are not priced.
            assert ranked(task, topology, 3) == every[:3]


@pytest.mark.parametrize(
    ("sizes", "engine"), [((1,), "shm"), ((4,), "shm"), ((1, 1), "tcp"), ((2, 2), "shm+tcp"), ((2, 1), "shm+tcp")]
)
def test_the_engine_follows_the_hosts(sizes: tuple[int, ...], engine: str) -> None:
    assert _all_reduce(_topology(*sizes), 100).engine == engine


def test_many_ranks_on_a_host_go_over_two_axes_where_latency_counts() -> None:
    plan = _all_reduce(_topology(64), 1000, Accumulation.WIDE)
    assert (plan.schedule.algorithm, plan.schedule.grid, plan.segment_bytes) == ("exchange", (8, 8), None)


def test_an_average_of_integers_stays_on_one_axis() -> None:
    for size_bytes in SIZES:
        assert _all_reduce(_topology(64), size_bytes, Accumulation.ONCE).schedule.grid == (64,)


def test_large_sums_between_hosts_leave_each_host_once_and_in_pieces() -> None:
    # Wide sums use direct algorithms, in which several hosts send to one host.
    for accumulation, left in ((Accumulation.SAME, 1.0), (Accumulation.WIDE, 0.94)):
        plan = _all_reduce(_topology(4, 4, 4, rails=(GIGABIT,)), 1 << 28, accumulation)
        assert plan.schedule.grid == (4, 3)
        assert plan.segment_bytes is not None
        # 2 n (H - 1) / H bytes leave each host; the plan is within 4 % of this lower bound.
        assert plan.predicted_seconds < 1.04 * 2 * (1 << 28) * 2 / 3 / (left * 119e6)


def test_small_sums_go_in_one_piece() -> None:
    assert _all_reduce(_topology(2, 2), 4096).segment_bytes is None


def test_narrow_uplinks_are_passed_by_as_little_as_can_be() -> None:
    uplink = replace(GIGABIT, bandwidth_bytes_per_s=59.5e6)
    racked = _topology(*[1] * 8, rails=(GIGABIT,), racks=_racks([0, 2, 4, 6], [1, 3, 5, 7], uplink=uplink))
    plan = _all_reduce(racked, 32 << 20)
    # The two racks exchange at least n bytes in each direction.
    assert (32 << 20) / 59.5e6 <= plan.predicted_seconds < 1.04 * (32 << 20) / 59.5e6
    # On any grid, the hosts of a rack follow each other.
    assert plan.schedule.order == (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.mark.parametrize(
    ("topology", "grids"),
    [
        (_topology(4), {(4,)}),
        (_topology(4, 4), {(8,), (4, 2)}),
        (_topology(2, 3), {(5,)}),
        (_topology(*[1] * 32), {(32,), (8, 4)}),
        (_topology(*[2] * 32), {(64,), (2, 32), (2, 8, 4)}),
        (_topology(2, 2, 2, 2, racks=_racks([0, 1], [2, 3])), {(8,), (2, 4), (2, 2, 2)}),
        (_topology(1, 1, 1, 1, racks=_racks([0, 1], [2, 3])), {(4,), (2, 2)}),
    ],
    ids=str,
)
def test_grids_to_choose_from(topology: Topology, grids: set[tuple[int, ...]]) -> None:
    found, order = grids_of(topology)
    assert set(found) == grids
    assert all(math.prod(grid) == len(order) for grid in found)
    offered = candidates(Collective.ALL_REDUCE, topology, Accumulation.SAME)
    tried = {each.grid for each in offered if not each.frame.joined}
    assert tried == grids


def test_a_root_on_any_rank_is_kept() -> None:
    for root in range(6):
        task = Task(collective=Collective.BROADCAST, size_bytes=1 << 20, root=root)
        assert cheapest(task, _topology(3, 3)).schedule.root == root


def _found(topology: Topology, collective: Collective, root: int = 0) -> dict[tuple[str, tuple[int, ...]], list[Way]]:
    schedules = candidates(collective, topology, Accumulation.SAME, root)
    return {(each.algorithm, each.grid): list(ways_of(each, topology)) for each in schedules}


def _part(link: Link, senders: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / senders)


def test_ranks_of_a_host_share_its_way_out() -> None:
    topology = _topology(4, 4)
    found = _found(topology, Collective.ALL_REDUCE)
    local, shared = Way(link=SHM, port=0), Way(link=_part(TCP, 4), port=1)
    # Every rank sends to the other host and receives from several ranks there.
    assert found["direct", (8,)] == [
        Way(link=replace(TCP, bandwidth_bytes_per_s=TCP.bandwidth_bytes_per_s / 4 * 0.94), port=1)
    ]
    assert found["ring", (8,)] == [Way(link=TCP, port=1)]  # only one rank sends to the other host
    assert found["direct", (4, 2)] == found["ring", (4, 2)] == [local, shared]
    broadcasts = _found(topology, Collective.BROADCAST, root=5)
    assert broadcasts["direct", (4, 2)] == [local, Way(link=TCP, port=1)]  # only the root sends between hosts
    assert broadcasts["direct", (8,)] == [Way(link=TCP, port=1)]


def test_large_sums_go_round_in_rings_where_many_would_send_to_one() -> None:
    plan = _all_reduce(_topology(2, 2, 2, 2, rails=(GIGABIT,)), 32 << 20)
    assert (plan.schedule.algorithm, plan.schedule.grid) in {("ring", (2, 4)), ("direct_ring", (2, 4))}


def test_where_ranks_take_turns_nothing_is_cut_and_all_hops_count() -> None:
    fast = replace(TCP, bandwidth_bytes_per_s=0.6e9)
    apart = _topology(2, 2, 2, 2, rails=(fast,), shm=replace(SHM, bandwidth_bytes_per_s=2.5e9))
    by_turns = replace(apart, takes_turns=True)
    assert _all_reduce(apart, 1 << 24).segment_bytes is not None
    assert _all_reduce(by_turns, 1 << 24).segment_bytes is None
    assert _all_reduce(by_turns, 1 << 24).schedule.grid == (2, 4)
    # In a flat ring, one rank sends out of each host while the other host sends to that rank.
    (flat,) = {ways[0].link.bandwidth_bytes_per_s for ways in [_found(by_turns, Collective.ALL_REDUCE)["ring", (8,)]]}
    assert 1 / flat == pytest.approx(1 / 0.6e9 + 1 / 5e9)
    # Several senders to one receiver get less bandwidth.
    direct, ring = (_found(by_turns, Collective.ALL_REDUCE)[name, (2, 4)][1].link for name in ("direct", "ring"))
    assert ring.bandwidth_bytes_per_s == pytest.approx(0.3e9)
    assert direct.bandwidth_bytes_per_s == pytest.approx(0.6 * 0.3e9)


def test_racks_share_their_uplinks_and_axes_the_rails() -> None:
    uplink = replace(TCP, latency_s=1e-5, bandwidth_bytes_per_s=4e8)
    topology = _topology(2, 2, 2, 2, racks=_racks([0, 1], [2, 3], uplink=uplink))
    found = _found(topology, Collective.ALL_REDUCE)
    further = replace(TCP, latency_s=TCP.latency_s + 1e-5)
    assert found["direct", (2, 2, 2)] == [
        Way(link=SHM, port=0),
        Way(link=_part(TCP, 2), port=1),
        Way(link=_part(further, 2), port=1, uplink_bytes_per_s=1e8),
    ]
    assert found["ring", (8,)] == [Way(link=further, port=1, uplink_bytes_per_s=4e8)]
    assert found["ring", (2, 4)][1] == Way(link=_part(further, 2), port=1, uplink_bytes_per_s=2e8)


def test_the_slowest_host_sets_the_pace() -> None:
    slow = replace(TCP, bandwidth_bytes_per_s=1e8)
    topology = _topology(1, 1, 1, own_rails=(OwnRails(host=1, rails=(slow,)),))
    assert _found(topology, Collective.ALL_REDUCE)["ring", (3,)] == [Way(link=slow, port=1)]


def test_rails_carry_shares_as_they_can() -> None:
    topology = _topology(1, 1, 1, rails=(_part(TCP, 10), _part(TCP, 40)))
    assert shares_of(topology) == ((1,), (4, 1))
    plan = _all_reduce(topology, 1 << 26)
    assert plan.schedule.shares == (4, 1)
    (way,) = ways_of(plan.schedule, topology)
    assert way.link.bandwidth_bytes_per_s == pytest.approx(TCP.bandwidth_bytes_per_s / 8)
    assert way.link.overhead_s == 2 * TCP.overhead_s
    assert _all_reduce(topology, 64).schedule.shares == (1,)  # a few bytes do not justify two messages
    assert shares_of(_topology(3, rails=topology.rails)) == ((1,),)  # there are no rails within a host
    assert shares_of(replace(topology, own_rails=(OwnRails(host=2, rails=(TCP, TCP)),))) == ((1,), (4, 1))


def test_shares_follow_the_uplinks_where_those_are_narrow() -> None:
    racks = (Rack(hosts=(0,), uplinks=(_part(TCP, 2), TCP)), Rack(hosts=(1,), uplinks=(_part(TCP, 2), TCP)))
    assert shares_of(_topology(1, 1, rails=(TCP, TCP), racks=racks)) == ((1,), (1, 1), (1, 2))


@given(st.lists(st.floats(1e6, 1e9), min_size=2, max_size=4))
def test_shares_are_small_and_close(bandwidths: list[float]) -> None:
    shares = proportion(bandwidths)
    assert all(share >= 1 for share in shares)
    assert sum(shares) <= 64 + len(shares)
    if min(bandwidths) > sum(bandwidths) / 10:
        worst = max(s / sum(shares) / (b / sum(bandwidths)) for s, b in zip(shares, bandwidths, strict=True))
        assert worst < 1.1
    assert proportion([1000.0, 250.0]) == (4, 1)
    assert proportion([941.0, 237.0]) == (4, 1)
    assert proportion([5.0, 5.0, 5.0]) == (1, 1, 1)


def test_a_small_exchange_saves_the_agreement() -> None:
    topology = _topology(2, 2, 2, 2)
    small, large = (
        {
            (plan.schedule.algorithm, plan.schedule.grid): plan.predicted_seconds
            for plan in ranked(Task(collective=Collective.ALL_REDUCE, size_bytes=size_bytes), topology)
            if plan.segment_bytes is None
        }
        for size_bytes in (NOTES_BYTES, NOTES_BYTES + 4)
    )
    agreement_s = SHM.latency_s + SHM.overhead_s + 2 * (TCP.latency_s + TCP.overhead_s)
    assert large["exchange", (2, 4)] - small["exchange", (2, 4)] == pytest.approx(agreement_s, rel=0.01)
    assert large["ring", (2, 4)] == pytest.approx(small["ring", (2, 4)], rel=1e-3)
    assert _all_reduce(topology, 256).schedule.algorithm == "exchange"


def test_what_the_price_knows_of_the_native_core_is_so() -> None:
    assert (NOTES_BYTES, timing.MOST_LANES) == (NOTE_BYTES, MOST_LANES)


def test_what_cannot_be_the_cheapest_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = _topology(*[8] * 8, rails=(GIGABIT,), racks=_racks(list(range(4)), list(range(4, 8)), uplink=GIGABIT))
    priced = []

    def counting(schedule: Schedule, *rest: Any) -> float:
        priced.append(schedule)
        return price(schedule, *rest)

    task = Task(collective=Collective.ALL_REDUCE, size_bytes=32 << 20)
    want = ranked(task, topology)
    monkeypatch.setattr("multiring.planner.plan.price", counting)
    assert cheapest(task, topology) == want[0]
    assert len(priced) < len(want) / 2


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ArgumentError, match="size_bytes=-1"):
        Task(collective=Collective.ALL_REDUCE, size_bytes=-1)
    with pytest.raises(ScheduleError, match="root=2"):
        cheapest(Task(collective=Collective.BROADCAST, size_bytes=1, root=2), _topology(2))
    with pytest.raises(ScheduleError, match="root=1"):
        cheapest(Task(collective=Collective.ALL_REDUCE, size_bytes=1, root=1), _topology(2))


def all_reduce_on(*grid: int, accumulation: Accumulation = Accumulation.SAME, wires: tuple[Wire, ...] = ()) -> Plan:
    order = tuple(range(math.prod(grid)))
    frame = Frame(collective=Collective.ALL_REDUCE, grid=grid, order=order, wires=wires)
    return Plan(build("direct", frame, accumulation), "shm", 1.0)


@pytest.mark.parametrize(
    ("plan", "task", "match"),
    [
        (all_reduce_on(3), {}, "want all_reduce on 4 ranks"),
        (all_reduce_on(4), {"collective": Collective.REDUCE_SCATTER}, "want reduce_scatter on 4 ranks"),
        (all_reduce_on(4), {"accumulation": Accumulation.WIDE}, "want wide accumulation, got same"),
        (all_reduce_on(4), {"wire": Wire.BF16}, "want wires bf16, got none"),
        (all_reduce_on(4, wires=(Wire.BF16,)), {}, "want wires none, got bf16"),
        (all_reduce_on(2, 2, wires=(Wire.BF16, Wire.BF16)), {"wire": Wire.BF16}, "want wires none,bf16, got bf16,bf16"),
    ],
)
def test_a_plan_for_something_else_is_refused(plan: Plan, task: dict[str, Any], match: str) -> None:
    wanted = Task(**{"collective": Collective.ALL_REDUCE, "size_bytes": 4096, **task})
    with pytest.raises(ScheduleError, match=f"for {wanted.collective.value} of 4096 bytes: {match}"):
        refuse_unfit(plan, wanted, Topology(((0, 1), (2, 3))))


def test_a_plan_from_another_root_is_refused() -> None:
    topology = Topology(((0, 1), (2, 3)))
    asked = [Task(collective=Collective.BROADCAST, size_bytes=64, root=root) for root in range(4)]
    plans = [cheapest(task, topology) for task in asked]
    for plan, task in product(plans, asked):
        if plan.schedule.root == task.root:
            refuse_unfit(plan, task, topology)
            continue
        with pytest.raises(ScheduleError, match=f"want root {task.root}, got {plan.schedule.root}"):
            refuse_unfit(plan, task, topology)
