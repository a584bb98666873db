"""Hosts of unequal size: each host puts the same number of ranks on the grid, and its other ranks join these."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.mutations import mutants_of
from tests.support.schedules import all_moves

from multiring._collectives import algorithms_of, build
from multiring._native import Lowering
from multiring._runtime.group.compile import lowering_of
from multiring._schedule import (
    Accumulation,
    Collective,
    Frame,
    Move,
    Moves,
    Schedule,
    Way,
    Wire,
    check,
    check_moves,
    interpret,
    least,
    price,
)
from multiring._topology import SHM, TCP, Link, Rack, Topology
from multiring.errors import ArgumentError, ScheduleError
from multiring.lab import LabPlan, parse_slots
from multiring.planner import Plan, Task, candidates, cheapest, ranked, ways_of
from multiring.planner.candidates import joined_frames
from multiring.planner.pins import pins_of, pins_text

ALL_REDUCE = Collective.ALL_REDUCE
SIZES = [(2, 1), (3, 1), (1, 4, 2), (4, 4, 3, 1), (3, 2, 2), (5, 2), (2, 2, 2, 2, 3)]
SLOW = replace(TCP, bandwidth_bytes_per_s=119e6)


def _topology(sizes: tuple[int, ...], *, shuffled: bool = False, **parts: object) -> Topology:
    ranks = iter(np.random.default_rng(sum(sizes)).permutation(sum(sizes)).tolist() if shuffled else range(sum(sizes)))
    return Topology(tuple(tuple(next(ranks) for _ in range(size)) for size in sizes), **parts)  # type: ignore[arg-type]


def _schedules(sizes: tuple[int, ...], *, shares: tuple[int, ...] = (1,)) -> Iterator[Schedule]:
    for shuffled in (False, True):
        for frame in joined_frames(_topology(sizes, shuffled=shuffled)):
            for algorithm in algorithms_of(ALL_REDUCE):
                yield build(algorithm, replace(frame, shares=shares))
            yield build("direct", replace(frame, shares=shares), Accumulation.WIDE)
            yield build("exchange", replace(frame, shares=shares), Accumulation.WIDE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_beyond_what_all_hosts_have_join_one_of_their_own_host(sizes: tuple[int, ...]) -> None:
    topology, least_of_all = _topology(sizes, shuffled=True), min(sizes)
    for frame in joined_frames(topology):
        assert frame.blocks == least_of_all * len(sizes)
        assert frame.ranks == sum(sizes)
        host_of = topology.host_of()
        for rank, partner in frame.joined:
            assert host_of[rank] == host_of[partner]
            assert (frame.joins(rank), frame.joins(partner)) == (partner, partner)
        joining = [len(frame.joined_to(rank)) for rank in frame.order]
        assert sum(joining) == len(frame.joined)
        for host in topology.hosts:
            dealt = [len(frame.joined_to(rank)) for rank in host if rank in frame.order]
            assert max(dealt) - min(dealt) <= 1


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 3), (1, 1, 1)], ids=str)
def test_nobody_joins_where_hosts_are_equal(sizes: tuple[int, ...]) -> None:
    assert joined_frames(_topology(sizes)) == []


@pytest.mark.parametrize("shares", [(1,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_rule_and_the_proof_of_all_moves_both_accept(sizes: tuple[int, ...], shares: tuple[int, ...]) -> None:
    for schedule in _schedules(sizes, shares=shares):
        check(schedule)
        check(schedule, [0, schedule.ranks - 1])
        check_moves(schedule, all_moves(schedule))


@pytest.mark.parametrize("algorithm", algorithms_of(ALL_REDUCE))
@pytest.mark.parametrize("sizes", [(2, 1), (3, 1), (2, 3)], ids=str)
def test_every_single_mutation_is_caught(sizes: tuple[int, ...], algorithm: str) -> None:
    (frame, *_) = joined_frames(_topology(sizes))
    schedule = build(algorithm, frame)
    programs, chunks = all_moves(schedule), len(schedule.extents_of(0, 40).count)
    ranks = {frame.joined[0][0], frame.joined[0][1]}
    for rank in ranks:
        original = list(programs[rank].rows())
        adds = next((move for move in original if set(move.peers) == {rank, *frame.joined_to(rank)}), None)
        for name, mutant in mutants_of(original, schedule.ranks, chunks):
            if algorithm == "exchange" and _reads_the_copy(original, mutant):
                continue
            with pytest.raises(ScheduleError):  # noqa: PT012 the second line names the mutant that passed
                check_moves(schedule, {**programs, rank: Moves.of(mutant)})
                pytest.fail(f"{name} of rank {rank} ({adds})")


def _reads_the_copy(original: list[Move], mutant: list[Move]) -> bool:
    """Return whether the mutant only combines its own operand from the original buffer: the bytes are the same."""
    pairs = [(before, after) for before, after in zip(original, mutant, strict=False) if before != after]
    return (
        len(original) == len(mutant) and len(pairs) == 1 and pairs[0][0]._replace(src=0) == pairs[0][1]._replace(src=0)
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "op"), [("float64", "sum"), ("int16", "max"), ("int64", "sum"), ("float16", "sum")])
def test_what_ranks_end_with_is_the_sum_of_all(sizes: tuple[int, ...], dtype: str, op: str) -> None:
    dice = np.random.default_rng(len(sizes))
    count = 40 * sum(sizes) + 7
    arrays = [dice.integers(-8, 8, count).astype(dtype) for _ in range(sum(sizes))]
    if op == "max":
        together = np.max(arrays, axis=0)
    else:
        together = np.sum(arrays, axis=0, dtype=np.float64 if "float" in dtype else np.int64)
    for schedule in _schedules(sizes, shares=(2, 1)):
        if dtype == "float16" and schedule.accumulation is not Accumulation.WIDE:
            continue
        for output in interpret(schedule, arrays, op).outputs:
            np.testing.assert_array_equal(output, together.astype(dtype))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5).filter(lambda sizes: len(set(sizes)) > 1), st.data())
def test_coded_axes_leave_all_ranks_the_same_bits(sizes: list[int], data: st.DataObject) -> None:
    topology = _topology(tuple(sizes), shuffled=True)
    wire = data.draw(st.sampled_from([Wire.BF16, Wire.INT8]))
    task = Task(collective=ALL_REDUCE, size_bytes=4 * 600, wire=wire)
    joined = [each.schedule for each in ranked(task, topology) if each.schedule.frame.joined]
    assert joined
    dice = np.random.default_rng(1)
    arrays = [dice.standard_normal(600).astype(np.float32) for _ in range(sum(sizes))]
    for schedule in joined:
        check(schedule)
        check_moves(schedule, all_moves(schedule))
        first, *others = interpret(schedule, arrays).outputs
        assert all(first.tobytes() == other.tobytes() for other in others)
        np.testing.assert_allclose(first, np.sum(arrays, axis=0), atol=0.2)


def test_narrow_integers_that_must_meet_in_one_move_do_not_join() -> None:
    topology = _topology((4, 4, 3, 1))
    assert not any(each.frame.joined for each in candidates(ALL_REDUCE, topology, Accumulation.ONCE))
    schedule = build("direct", joined_frames(_topology((2, 1)))[0])
    with pytest.raises(ScheduleError, match="with joining ranks, is not accumulated once"):
        check(replace(schedule, accumulation=Accumulation.ONCE))


@pytest.mark.parametrize("collective", [each for each in Collective if each is not ALL_REDUCE])
def test_only_an_all_reduce_is_joined(collective: Collective) -> None:
    assert not any(each.frame.joined for each in candidates(collective, _topology((3, 1)), Accumulation.SAME))
    with pytest.raises(ScheduleError, match="only an all_reduce can be joined"):
        Frame(collective=collective, grid=(2,), order=(0, 1), joined=((2, 0),))


@pytest.mark.parametrize(
    ("order", "joined", "match"),
    [
        ((0, 1), ((1, 0),), "order=(0, 1): want each of the 2 ranks of grid (2,) once, without the joining ranks [1]"),
        ((0, 1), ((3, 0),), "want each of the 2 ranks"),
        ((0, 1, 2), ((3, 0),), "want each of the 2 ranks"),
        ((0, 1), ((2, 3), (3, 0)), "want ranks of grid (2,) to join, got 3"),
        ((0, 1), ((2, 7),), "want ranks of grid (2,) to join, got 7"),
    ],
)
def test_what_cannot_join_is_named(order: tuple[int, ...], joined: tuple[tuple[int, int], ...], match: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(match)):
        Frame(collective=ALL_REDUCE, grid=(2,), order=order, joined=joined)


def test_who_joins_has_no_position() -> None:
    frame = Frame(collective=ALL_REDUCE, grid=(2,), order=(2, 0), joined=((1, 2),))
    assert (frame.position_of(2), frame.position_of(0)) == (0, 1)
    with pytest.raises(ScheduleError, match="rank=1: it joins rank 2, and has no position of its own"):
        frame.position_of(1)
    with pytest.raises(ScheduleError, match="rank=3: want 0 to 2"):
        build("ring", frame).moves_of(3)


def test_schedules_that_are_joined_differently_have_different_digests_and_words() -> None:
    frame = Frame(collective=ALL_REDUCE, grid=(2,), order=(0, 1), joined=((2, 0), (3, 1)))
    one, other = build("ring", frame), build("ring", replace(frame, joined=((2, 1), (3, 0))))
    assert one.digest() != other.digest()
    assert str(one) == "ring all_reduce on 2 ranks and 2 that join them"
    assert "before the first axis, and after the last: 2 joins 0, 3 joins 1" in one.describe()


def test_what_joins_costs_what_its_messages_do() -> None:
    """A rank with k joined ranks receives, adds and returns k whole buffers on its own port; the ring is unchanged."""
    n, plain = 1 << 20, Link(latency_s=1e-6, overhead_s=1e-7, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=4e9)
    wire = Link(latency_s=1e-4, overhead_s=1e-6, bandwidth_bytes_per_s=1e8, reduce_bytes_per_s=1e9)
    frame = Frame(collective=ALL_REDUCE, grid=(2,), order=(0, 1), joined=((2, 0), (3, 0), (4, 0)))
    ways = (Way(link=wire, port=1), Way(link=plain, port=0))
    alone = price(build("direct", replace(frame, joined=())), n, ways[:1])
    found = price(build("direct", frame), n, ways)
    carried = 3 * n / plain.bandwidth_bytes_per_s
    # Joined ranks send concurrently, but their results are sent one after the other.
    handled = 2 * plain.overhead_s + 2 * plain.latency_s
    joins = 2 * carried + n / plain.reduce_bytes_per_s + handled
    assert found - alone == pytest.approx(joins, rel=0.01)
    assert least(build("direct", frame), n, ways, [1])[0] <= found


def test_every_joined_schedule_needs_a_way_for_what_joins() -> None:
    schedule = build("ring", joined_frames(_topology((2, 1)))[0])
    with pytest.raises(ScheduleError, match="want one for every axis, and one for those that join"):
        price(schedule, 100, (TCP,))
    assert ways_of(schedule, _topology((2, 1)))[-1] == Way(link=SHM, port=0)


def test_the_grid_of_those_who_stand_follows_racks() -> None:
    racks = (Rack(hosts=(0, 1)), Rack(hosts=(2, 3)))
    topology = _topology((4, 3, 2, 2), racks=racks, rails=(SLOW,))
    assert (2, 2, 2) in {frame.grid for frame in joined_frames(topology)}


def test_large_sums_over_slow_wires_are_joined() -> None:
    topology = _topology((4, 4, 3, 1), rails=(SLOW,))
    for size_bytes in (1 << 20, 1 << 25):
        plan = cheapest(Task(collective=ALL_REDUCE, size_bytes=size_bytes), topology)
        assert plan.schedule.frame.joined, plan
        assert plan.engine == "shm+tcp"


def test_an_exchange_that_is_joined_is_not_one_of_notes() -> None:
    frame = joined_frames(_topology((2, 1)))[0]
    assert lowering_of(build("exchange", frame), 100, on_one_host=False) is Lowering.NONE
    assert (
        lowering_of(build("exchange", replace(frame, joined=(), grid=(2,), order=(0, 1))), 100, on_one_host=False)
        is Lowering.NOTES
    )


def test_a_joined_plan_is_pinned_as_it_is() -> None:
    topology = _topology((4, 4, 3, 1), rails=(SLOW,))
    task = Task(collective=ALL_REDUCE, size_bytes=1 << 25)
    plan = cheapest(task, topology)
    text = pins_text([(task, plan)], topology)
    assert pins_of(text).plans == ((task, plan),)
    for wrong in ("[[1]]", "[[1, 99]]", "7"):
        broken = re.sub(r"^joined = .*$", f"joined = {wrong}", text, flags=re.MULTILINE)
        with pytest.raises(ArgumentError, match="a pinned plan for all_reduce is not valid"):
            pins_of(broken)


def test_a_lab_may_have_slots_of_its_own_for_each_host() -> None:
    plan = LabPlan(hosts=3, slots=(2, 1, 3))
    assert (plan.num_ranks, plan.slots_text) == (6, "2,1,3")
    assert plan.seats() == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert (parse_slots("4"), parse_slots("4,4,1")) == (4, (4, 4, 1))
    for text in ("", "4,", "-1", "4x", "four"):
        with pytest.raises(ArgumentError, match="want the number of ranks of each host"):
            parse_slots(text)
    with pytest.raises(ArgumentError, match="slots=2,1 are for 2 hosts, but the lab has 3 hosts"):
        LabPlan(hosts=3, slots=(2, 1))
    with pytest.raises(ArgumentError, match="a lab with 0 slots: want at least 1"):
        LabPlan(hosts=2, slots=(2, 0))


def test_plans_of_the_past_have_no_joined_ranks() -> None:
    topology = _topology((2, 2))
    task = Task(collective=ALL_REDUCE, size_bytes=1 << 20)
    plan: Plan = cheapest(task, topology)
    assert "joined" not in pins_text([(task, plan)], topology)
