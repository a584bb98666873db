"""Faster evaluations of the events of all ranks give the same times, on random schedules and links."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from tests.support.schedules import frame_on

from multiring._collectives import TABLE, build
from multiring._schedule import Collective, Schedule, Way
from multiring._schedule.price import representative
from multiring._simulator import seconds_of_all, seconds_of_ranks
from multiring._simulator.events import programs_of
from multiring._simulator.lockstep import seconds_in_lockstep
from multiring._simulator.rotation import is_rotated, peers_of
from multiring._topology import Link

Random = np.random.Generator


def _schedule(random: Random) -> Schedule:
    grid = tuple(random.integers(1, 5, size=random.integers(1, 4)).tolist())
    collective, algorithm = list(TABLE)[random.integers(len(TABLE))]
    frame = frame_on(collective, grid, shuffled=bool(random.integers(2)))
    if collective is Collective.ALL_REDUCE and random.integers(4) == 0:
        frame = replace(frame, joined=((frame.ranks, 0), (frame.ranks + 1, frame.ranks - 1)))
    return build(algorithm, frame)


def _varied(link: Link, random: Random, spread: float) -> Link:
    factors = np.exp(random.normal(size=len(fields(link))) * spread)
    return Link(**{each.name: getattr(link, each.name) * by for each, by in zip(fields(link), factors, strict=True)})


def _ways(schedule: Schedule, random: Random, shared: int) -> list[tuple[Way, ...]]:
    """Return ways of unequal ranks, through some of `shared` links."""
    axes = len(schedule.grid) + bool(schedule.frame.joined)
    names = ("latency_s", "overhead_s", "bandwidth_bytes_per_s", "reduce_bytes_per_s")
    lowest, highest = (-6, -7, 8, 9), (-4.5, -5, 9.5, 10)
    usual = [
        Link(**dict(zip(names, (10 ** random.uniform(lowest, highest)).tolist(), strict=True))) for _ in range(axes)
    ]
    ports = random.integers(0, 2, size=axes).tolist()
    spread = float(random.choice([0.01, 0.3, 1.0]))

    def some_shared() -> tuple[int, ...]:
        return tuple(random.integers(0, shared, size=random.integers(0, 2)).tolist()) if shared else ()

    def way(link: Link, port: int) -> Way:
        uplink = None if random.random() < 0.7 else 1e8
        own = _varied(link, random, spread)
        return Way(link=own, port=port, uplink_bytes_per_s=uplink, leaves=some_shared(), enters=some_shared())

    return [tuple(map(way, usual, ports)) for _ in range(schedule.ranks)]


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_schedules_take_what_the_events_say(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds: Counter[str] = Counter()
    for _ in range(100):
        schedule = _schedule(random)
        shared = int(random.integers(0, 2)) * 3
        segments = int(random.choice([1, 1, 3]))
        ways = _ways(schedule, random, shared)
        rates = (10 ** random.uniform(8, 9.5, size=shared)).tolist()
        size_bytes = float(10 ** random.uniform(2, 8))
        found = seconds_of_ranks(schedule, size_bytes, ways, segments, rates)
        assert found == pytest.approx(seconds_of_all(schedule, size_bytes, ways, segments, rates), rel=1e-9)
        in_lockstep = None if shared or segments > 1 else seconds_in_lockstep(schedule, size_bytes, ways)
        kinds["rotated" if is_rotated(schedule) else "each"] += 1
        kinds["lockstep" if in_lockstep is not None else "events"] += 1
    assert min(kinds[kind] for kind in ("rotated", "each", "lockstep", "events")) >= 10, kinds


@pytest.mark.parametrize("segments", [1, 2, 20])
def test_equal_hosts_whose_ranks_queue_take_what_the_events_say(segments: int) -> None:
    # Equal ranks do everything at equal times, so the order of equal times decides who waits.
    random = np.random.default_rng(segments)
    kinds: Counter[bool] = Counter()
    for _ in range(30):
        schedule = _schedule(random)
        link = Link(latency_s=2e-6, overhead_s=1e-6, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=1e10)
        size = int(random.integers(1, 5))
        hosts = -(-schedule.ranks // size)
        axes = len(schedule.grid) + bool(schedule.frame.joined)
        ways = []
        for rank in range(schedule.ranks):
            host = rank // size
            between = Way(link=link, port=1, leaves=(host,), enters=(hosts + host,))
            ways.append((Way(link=link, port=0), *[between] * axes)[:axes])
        size_bytes = float(random.choice([1e3, 1e6]))
        rates = [float(random.choice([5e8, 1e9, 3e9]))] * (2 * hosts)
        found = seconds_of_ranks(schedule, size_bytes, ways, segments, rates)
        assert found == pytest.approx(seconds_of_all(schedule, size_bytes, ways, segments, rates), rel=1e-9)
        kinds[is_rotated(schedule)] += 1
    assert kinds[True] >= 10, kinds


@pytest.mark.parametrize("grid", [(1,), (3,), (2, 3), (3, 1, 4)], ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), TABLE, ids=lambda value: getattr(value, "value", value))
def test_the_rotated_steps_of_one_rank_are_those_of_all_ranks(
    collective: Collective, algorithm: str, grid: tuple[int, ...]
) -> None:
    schedule = build(algorithm, frame_on(collective, grid))
    if collective is Collective.BROADCAST:
        assert not is_rotated(schedule)
        return
    for rank, own in enumerate(programs_of(schedule)):
        # Queues have other names; a step takes as many messages from the same axis.
        for step, other in zip(representative(schedule), own, strict=True):
            sent = [(axis, peers_of(schedule, axis, queue)[rank]) for axis, _, queue, _ in step.sends]
            assert sent == [message[:2] for message in other.sends]
            assert len(step.takes) == len(other.takes)
            assert (step.chunks, step.axis, step.carried) == (other.chunks, other.axis, other.carried)


def test_a_message_that_overtakes_an_earlier_one_is_left_to_the_events() -> None:
    # Rank 3 waits for slow messages along the first axis, while a fast rank already sends along the second one.
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (3, 2)))
    fast = Link(latency_s=1e-6, overhead_s=1e-7, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=1e10)
    ways = [(Way(link=fast, port=0),) * 2 for _ in range(6)]
    for rank in range(3):
        ways[rank] = (Way(link=replace(fast, latency_s=1e-3), port=0),) * 2
    assert seconds_in_lockstep(schedule, 6e3, ways) is None
    assert seconds_of_ranks(schedule, 6e3, ways) == pytest.approx(seconds_of_all(schedule, 6e3, ways), rel=1e-12)
