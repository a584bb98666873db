"""Operations in flight together: the events of all ranks, one rank that stands for all, and a bound without events."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.schedules import frame_on

from multiring._collectives import build
from multiring._schedule import Collective, TimedOperation, Way, ends_of, timed_operation
from multiring._simulator.events import programs_of
from multiring._simulator.presets import preset
from multiring._simulator.step import part_of
from multiring._topology import Link
from multiring.planner import Task
from multiring.planner.parallelism import flights
from multiring.planner.parallelism.flights import ends_in_flight
from multiring.planner.plan import PlannedOperation, planned_operation

LINK = Link(latency_s=30e-6, overhead_s=4e-6, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=6e9)
PLAIN = Link(latency_s=0, overhead_s=0, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=float("inf"))
MIB = 1 << 20


def _ring(size_bytes: float, start_s: float, link: Link = PLAIN, segments: int = 1) -> TimedOperation:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (2,)))
    return timed_operation(schedule, size_bytes, [Way(link=link, port=0)], segments, start_s)


def test_an_operation_alone_takes_its_time_after_its_start() -> None:
    alone = ends_of([_ring(1e9, 0.0, LINK)])[0]
    assert ends_of([_ring(1e9, 3.0, LINK)]) == [pytest.approx(3 + alone, rel=1e-12)]
    # The second operation starts after the first has ended.
    assert ends_of([_ring(1e9, 0.0, LINK), _ring(1e9, 2 * alone, LINK)]) == pytest.approx([alone, 3 * alone], rel=1e-12)


def test_operations_in_flight_share_the_wire_and_fill_each_others_pauses() -> None:
    # Alone, each has two messages of 0.5 s, and a latency of 0.25 s after each.
    slow = replace(PLAIN, latency_s=0.25)
    assert ends_of([_ring(1e9, 0.0, slow)]) == pytest.approx([1.5])
    # The wire carries the first message of each, and then the second of each: it never waits.
    assert ends_of([_ring(1e9, 0.0, slow), _ring(1e9, 0.0, slow)]) == pytest.approx([1.75, 2.25])


def test_a_connection_that_has_queued_enough_serves_the_oldest_operation() -> None:
    """A small, older operation passes messages that are held, but not those that its connection has queued."""
    tiny, wide = _ring(2 * MIB, 0.0), _ring(64 * MIB, 0.0, segments=16)
    first, last = ends_of([tiny, wide])
    alone_s = 2 * MIB / 1e9
    # Each of 16 lanes has posted 2 MiB. One of them is before each message of the older operation, and not all 16.
    assert alone_s < first <= alone_s + 2 * 2 * MIB / 1e9 < alone_s + 16 * 2 * MIB / 1e9
    assert last == pytest.approx(66 * MIB / 1e9)


def _all_ranks(operation: PlannedOperation, start_s: float) -> TimedOperation:
    """Return the operation as the events of all ranks take it."""
    schedule = operation.schedule
    chunk_bytes = operation.size_bytes / operation.segments / schedule.frame.blocks
    ways = (operation.ways,) * schedule.ranks
    return TimedOperation(
        programs_of(schedule), ways, chunk_bytes, operation.segments, start_s + operation.before_moves_s
    )


def _drawn(seed: int) -> tuple[list[PlannedOperation], list[float]]:
    """Return operations on a part of a known cluster, with random sizes and starts."""
    draw = random.Random(seed)  # noqa: S311 -- no secret
    name, ranks = draw.choice([("ddl", 8), ("ddl", 16), ("horovod", 4), ("horovod", 12), ("p5", 16), ("pfn", 16)])
    cluster = part_of(preset(name).topology, ranks)
    sizes = [draw.choice([64, 4096, MIB, 4 * MIB]) for _ in range(draw.randint(2, 5))]
    tasks = [Task(collective=Collective.ALL_REDUCE, size_bytes=size) for size in sizes]
    operations = [planned_operation(task, cluster) for task in tasks]
    longest = max(each.seconds for each in operations)
    starts_s = sorted(draw.choice([0.0, draw.random() * longest]) for _ in sizes)
    return operations, starts_s


@pytest.mark.parametrize("seed", range(12))
def test_one_rank_stands_for_all_with_several_operations_in_flight(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MOST_MESSAGES", 10**9)  # events, however many messages there are
    operations, starts_s = _drawn(seed)
    every = ends_of([_all_ranks(each, start_s) for each, start_s in zip(operations, starts_s, strict=True)])
    assert ends_in_flight(operations, starts_s) == pytest.approx(every, rel=1e-9)


def _timed(operations: Sequence[PlannedOperation], starts_s: Sequence[float], most_messages: int) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flights, "MOST_MESSAGES", most_messages)
        return ends_in_flight(operations, starts_s)


def test_many_messages_take_nearly_what_the_events_say() -> None:
    """The bound of the last end is within 4 % in three of four draws, and off by at most a third."""
    errors = []
    for seed in range(30):
        operations, starts_s = _drawn(seed)
        events = max(_timed(operations, starts_s, 10**9))
        errors.append(abs(max(_timed(operations, starts_s, 0)) - events) / events)
    assert sorted(errors)[len(errors) * 3 // 4] < 0.04
    assert max(errors) < 0.34


def test_operations_far_apart_take_what_their_plans_take() -> None:
    operations, _ = _drawn(0)
    far = [10.0 * number for number in range(len(operations))]
    want = [start_s + each.seconds for each, start_s in zip(operations, far, strict=True)]
    assert _timed(operations, far, 10**9) == want == _timed(operations, far, 0)
