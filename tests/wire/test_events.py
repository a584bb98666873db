"""Events record each operation and each wait, with consistent times."""

import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

import multiring
from multiring import Event


def some_of_each(here: Here) -> list[Event]:
    group = here.join()
    assert multiring.drain_events() == []
    group.all_reduce(np.ones(1000, np.float32))
    group.broadcast(np.ones((3, 5)), root=1)
    group.reduce_scatter(np.ones(10, np.int8))
    group.all_gather(np.ones(4))
    group.all_to_all_async(np.ones(here.size)).wait()
    group.barrier()
    group.subgroup([0])
    if here.rank == 0:
        group.send(np.ones(2), 1, tag=3)
    if here.rank == 1:
        group.recv(np.ones(2), 0, tag=3)
    events = multiring.drain_events()
    assert multiring.drain_events() == []
    return events


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_every_operation_is_recorded(engine: str) -> None:
    by_rank = run_ranks(some_of_each, 3, engine=engine)
    for rank, events in enumerate(by_rank):
        operations = [event for event in events if event.kind == "operation"]
        message = [("send", 16)] if rank == 0 else [("recv", 16)] if rank == 1 else []
        assert [(event.name, event.size_bytes) for event in operations] == [
            ("all_reduce", 4000),
            ("broadcast", 120),
            ("reduce_scatter", 10),
            *(("all_gather", 96), ("all_to_all", 24), ("barrier", 0), ("subgroup", 0)),
            *message,
        ]
        world = operations[:7]
        assert len({event.group for event in world}) == 1
        assert [event.operation for event in world] == [1, 2, 3, 4, 5, 6, 7]
        for event in operations:
            assert event.rank == rank
            assert event.agreed_s is not None
            assert event.start_s <= event.agreed_s <= event.end_s
        for event in events:
            assert event.kind == "operation" or (event.agreed_s is None and event.start_s <= event.end_s)
        assert {event.name for event in events if event.kind == "wait"} >= {"all_reduce", "barrier"}
    # All ranks use the host's clock: an operation is agreed on no earlier than its last rank started it.
    for same in zip(*([event for event in events if event.name == "barrier"][:1] for events in by_rank), strict=True):
        assert min(event.agreed_s for event in same) >= max(event.start_s for event in same)


def wait_for_a_late_one(here: Here) -> list[Event]:
    group = here.join()
    group.barrier()
    multiring.drain_events()
    time.sleep(1.5 if here.rank == 1 else 0)
    group.all_reduce(np.ones(10))
    return multiring.drain_events()


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_waiting_shows_in_the_waits(engine: str) -> None:
    def waited_s(events: list[Event]) -> float:
        return sum(event.end_s - event.start_s for event in events if event.kind == "wait")

    early, late = map(waited_s, run_ranks(wait_for_a_late_one, 2, engine=engine))
    assert early > 0.2
    assert late < early


def overflow(here: Here) -> tuple[int, int]:
    group = here.join()
    barriers = 40_000  # two events each
    for _ in range(barriers):
        group.barrier()
    kept = len(multiring.drain_events())
    group.barrier()
    return kept, len(multiring.drain_events())


def test_what_nobody_takes_is_bounded() -> None:
    assert run_ranks(overflow, 1) == [(65_536, 2)]


def failed(here: Here) -> list[Any]:
    group = here.join()
    with pytest.raises(multiring.errors.MismatchError):
        group.all_reduce(np.ones(1 + here.rank))
    return [(event.kind, event.name) for event in multiring.drain_events()]


def test_failures_are_recorded_too() -> None:
    for kinds in run_ranks(failed, 2):
        assert ("operation", "all_reduce") in kinds
