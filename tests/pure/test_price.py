"""`price` equals the closed forms of docs/algorithms.md, and a simulation of all ranks' moves."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.schedules import frame_on

from multiring._collectives import TABLE, build
from multiring._schedule import Collective, Schedule, Way, Wire, least, price
from multiring._schedule.price import loads, representative, rounds
from multiring._schedule.timing import last_end
from multiring._simulator import seconds_of_all
from multiring._topology import SHM, TCP, Link
from multiring.errors import ScheduleError

LINKS = [
    Link(latency_s=2e-6, overhead_s=1e-6, bandwidth_bytes_per_s=8e9, reduce_bytes_per_s=5e9),
    Link(latency_s=30e-6, overhead_s=4e-6, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=6e9),
    Link(latency_s=50e-6, overhead_s=7e-6, bandwidth_bytes_per_s=3e8, reduce_bytes_per_s=7e9),
    Link(latency_s=9e-6, overhead_s=0, bandwidth_bytes_per_s=2e9, reduce_bytes_per_s=3e9),
]
SIZES = [0, 8, 100_000, 64 << 20]


def _ways(links: Sequence[Link]) -> list[Way]:
    return [Way(link=link, port=axis) for axis, link in enumerate(links)]


def _price_of_all(schedule: Schedule, size_bytes: float, ways: Sequence[Way], segments: int = 1) -> float:
    """Return when the last of all ranks ends, if each has the same ways."""
    return seconds_of_all(schedule, size_bytes, [ways] * schedule.ranks, segments)


@pytest.mark.parametrize("grid", [(1,), (2,), (5,), (13,), (1, 1), (2, 3), (4, 4), (3, 1, 2), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_one_rank_stands_for_all(collective: Collective, algorithm: str, grid: tuple[int, ...]) -> None:
    schedule = build(algorithm, frame_on(collective, grid))
    links = LINKS[: len(schedule.grid)]
    for size_bytes in SIZES:
        assert price(schedule, size_bytes, links) == pytest.approx(
            _price_of_all(schedule, size_bytes, _ways(links)), rel=1e-12
        )


SHARED = [
    Way(link=replace(LINKS[0], bandwidth_bytes_per_s=4e9), port=0),
    Way(link=LINKS[2], port=1),
    Way(link=LINKS[2], port=1, uplink_bytes_per_s=1e8),
]


@pytest.mark.parametrize("segments", [2, 3, 7, 12])
@pytest.mark.parametrize("grid", [(5,), (2, 3), (2, 2, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "direct_ring"])
def test_one_rank_stands_for_all_with_segments_and_shared_ports(
    algorithm: str, grid: tuple[int, ...], segments: int
) -> None:
    schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, grid))
    ways = SHARED[-len(grid) :] if len(grid) < 3 else SHARED
    for size_bytes in (1000, 4 << 20):
        found = price(schedule, size_bytes, ways, segments)
        assert found == pytest.approx(_price_of_all(schedule, size_bytes, ways, segments), rel=1e-9)
        assert found >= least(schedule, size_bytes, ways, [segments])[0]


@pytest.mark.parametrize("grid", [(2,), (8,), (2, 4), (2, 2, 2), (2, 4, 2), (4, 3, 3)], ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "direct_ring"])
def test_many_segments_cost_what_the_events_say(algorithm: str, grid: tuple[int, ...]) -> None:
    schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, grid))
    ways = SHARED[-len(grid) :] if len(grid) < 3 else SHARED
    for segments in (16, 33, 100):
        for segment_bytes in (1 << 12, 1 << 16, 1 << 20):
            size_bytes = segment_bytes * segments
            events = last_end((representative(schedule),), (ways,), segment_bytes / schedule.ranks, segments)
            assert price(schedule, size_bytes, ways, segments) == pytest.approx(events, rel=0.03)


def test_segments_overlap_what_goes_by_different_ports_and_not_what_shares_one() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (4, 4)))
    link = Link(latency_s=0, overhead_s=0, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=math.inf)
    size_bytes = 1e9
    axes = [2 * 3 / 4, 2 * 3 / 4 / 4]  # seconds that each axis needs
    apart = [Way(link=link, port=0), Way(link=link, port=1)]
    together = [Way(link=link, port=0), Way(link=link, port=0)]
    assert price(schedule, size_bytes, apart) == pytest.approx(sum(axes))
    assert price(schedule, size_bytes, apart, 1000) == pytest.approx(max(axes), rel=0.01)
    assert price(schedule, size_bytes, together, 1000) == pytest.approx(sum(axes), rel=0.01)


def test_an_uplink_narrows_what_passes_it() -> None:
    schedule = build("direct", frame_on(Collective.ALL_REDUCE, (2, 2)))
    link = Link(latency_s=0, overhead_s=0, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=math.inf)
    ways = [Way(link=link, port=0), Way(link=link, port=0, uplink_bytes_per_s=1e8)]
    assert price(schedule, 1e9, ways) == pytest.approx(1.0 + 0.5 * 10)  # the uplink slows the second axis tenfold


@pytest.mark.parametrize("algorithm", ["direct", "tree"])
def test_broadcasts_in_segments_are_faster_and_right_on_a_line(algorithm: str) -> None:
    schedule = build(algorithm, frame_on(Collective.BROADCAST, (5,)))
    ways = _ways(LINKS[1:2])
    whole = price(schedule, 8 << 20, ways)
    cut = price(schedule, 8 << 20, ways, 8)
    assert cut <= whole * 1.05
    assert cut == pytest.approx(_price_of_all(schedule, 8 << 20, ways, 8), rel=0.05)


def _sent(messages: int, n: float, link: Link) -> float:
    """Return the closed form for `messages` messages of n bytes; one is on the wire while the next is prepared."""
    wire_s = n / link.bandwidth_bytes_per_s
    if not messages:
        return 0
    return link.latency_s + min(link.overhead_s, wire_s) + messages * max(link.overhead_s, wire_s)


def _scatter(algorithm: str, p: int, n: float, link: Link) -> float:
    """Return the closed form of a reduce-scatter of n bytes along an axis of p ranks."""
    if p == 1:
        return 0
    reduce_s = n / p / link.reduce_bytes_per_s
    if algorithm == "ring":
        return (p - 1) * (_sent(1, n / p, link) + reduce_s)
    return _sent(p - 1, n / p, link) + reduce_s


def _gather(algorithm: str, p: int, n: float, link: Link) -> float:
    return (p - 1) * _sent(1, n / p, link) if algorithm == "ring" else _sent(p - 1, n / p, link)


@pytest.mark.parametrize("grid", [(1,), (2,), (7,), (2, 3), (4, 16, 4), (3, 1, 2, 5)], ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "direct_ring"])
def test_all_reduce_costs_its_closed_form(algorithm: str, grid: tuple[int, ...]) -> None:
    schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, grid))
    for n in SIZES:
        want = 0.0
        for axis, p in enumerate(grid):
            on_axis = {"direct_ring": "ring" if axis else "direct"}.get(algorithm, algorithm)
            left = n / math.prod(grid[:axis])
            want += _scatter(on_axis, p, left, LINKS[axis]) + _gather(on_axis, p, left, LINKS[axis])
        assert price(schedule, n, LINKS[: len(grid)]) == pytest.approx(want, rel=1e-12)


def test_rings_cost_what_the_design_says() -> None:
    # T = 2 sum_i [(p_i - 1) alpha_i + ((p_i - 1) / p_i) (N / prod_{j<i} p_j) / B_i], without the time to reduce.
    grid, n = (4, 16, 4), 256e6
    links = [replace(link, reduce_bytes_per_s=math.inf) for link in LINKS[:3]]
    want = 2 * sum(
        (p - 1) * (link.latency_s + link.overhead_s)
        + (p - 1) / p * (n / math.prod(grid[:axis])) / link.bandwidth_bytes_per_s
        for axis, (p, link) in enumerate(zip(grid, links, strict=True))
    )
    assert price(build("ring", frame_on(Collective.ALL_REDUCE, grid)), n, links) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("p", [1, 2, 5, 8, 17])
def test_broadcasts_and_exchanges_cost_their_closed_forms(p: int) -> None:
    for n in SIZES:
        link = LINKS[1]
        direct = build("direct", frame_on(Collective.BROADCAST, (p,)))
        assert price(direct, n, [link]) == pytest.approx(_sent(p - 1, n, link), rel=1e-12)
        # For a power of two, the longest path follows the first child each time.
        if p & (p - 1) == 0:
            tree = build("tree", frame_on(Collective.BROADCAST, (p,)))
            assert price(tree, n, [link]) == pytest.approx((p.bit_length() - 1) * _sent(1, n, link), rel=1e-12)
        exchange = build("direct", frame_on(Collective.ALL_TO_ALL, (p,)))
        own = n / p / link.reduce_bytes_per_s
        # The rank copies its own block while the messages are in flight.
        assert price(exchange, n, [link]) == pytest.approx(max(own, _sent(p - 1, n / p, link)), rel=1e-12)


def test_channels_share_a_link() -> None:
    one = build("ring", frame_on(Collective.ALL_REDUCE, (4,)))
    two = build("ring", frame_on(Collective.ALL_REDUCE, (4,), shares=(3, 1)))
    assert price(one, 1e6, [SHM]) == price(two, 1e6, [SHM])


def test_every_axis_needs_its_link() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (2, 2)))
    for links in ([], [SHM], [SHM, TCP, TCP]):
        with pytest.raises(ScheduleError, match=f"{len(links)} links for grid"):
            price(schedule, 1e6, links)


@pytest.mark.parametrize("p", [2, 3, 8, 17])
def test_an_exchange_costs_its_closed_form(p: int) -> None:
    schedule = build("exchange", frame_on(Collective.ALL_REDUCE, (p,)))
    for n in SIZES:
        link = LINKS[0]
        want = _sent(p - 1, n, link) + 2 * n / link.reduce_bytes_per_s
        assert price(schedule, n, [link]) == pytest.approx(want, rel=1e-12)


def _steps_counted(schedule: Schedule) -> tuple[list[int], list[float], list[float]]:
    kinds = len(schedule.grid) + bool(schedule.frame.joined)
    messages, chunks, written = [0] * kinds, [0.0] * kinds, [0.0] * kinds
    for step in representative(schedule):
        for message in step.sends:
            messages[message.axis] += 1
            chunks[message.axis] += step.chunks * step.carried
        if step.axis >= 0:
            written[step.axis] += step.chunks
    return messages, chunks, written


@pytest.mark.parametrize("grid", [(1,), (2, 3), (3, 1, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_the_bound_counts_the_steps_of_the_representative(
    collective: Collective, algorithm: str, grid: tuple[int, ...]
) -> None:
    schedule = build(algorithm, frame_on(collective, grid))
    assert loads(schedule) == _steps_counted(schedule)


@pytest.mark.parametrize("grid", [(1,), (2, 3), (3, 1, 2)], ids=str)
def test_the_bound_counts_joining_ranks_and_coded_axes(grid: tuple[int, ...]) -> None:
    frame, ranks = frame_on(Collective.ALL_REDUCE, grid), math.prod(grid)
    joined = replace(frame, joined=((ranks, 0), (ranks + 1, ranks - 1), (ranks + 2, ranks - 1)))
    for schedule in (
        *(build(algorithm, joined) for algorithm in ("ring", "direct", "exchange")),
        build("direct", replace(frame, wires=(Wire.INT8,) * len(grid))),
    ):
        for counted, wanted in zip(loads(schedule), _steps_counted(schedule), strict=True):
            assert counted == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("grid", [(1,), (2,), (5,), (2, 3), (3, 1, 2), (4, 4)], ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_messages_that_follow_each_other_are_a_bound(
    collective: Collective, algorithm: str, grid: tuple[int, ...], *, shuffled: bool
) -> None:
    schedule = build(algorithm, frame_on(collective, grid, shuffled=shuffled))
    link = Link(latency_s=1e-5, overhead_s=1e-6, bandwidth_bytes_per_s=1e15, reduce_bytes_per_s=1e15)
    ways = _ways([link] * len(schedule.grid))
    (bound,) = least(schedule, 8, ways, [1])
    assert bound <= price(schedule, 8, ways) * (1 + 1e-9)
    if algorithm == "ring" and not shuffled:
        halves = 2 if collective is Collective.ALL_REDUCE else 1
        assert rounds(schedule) == [halves * (size - 1) for size in schedule.grid]
