"""The executor does what the Schedule says: each move, in order, with the bytes of its extents."""

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from tests.support.cases import Case, place
from tests.support.ranks import ENGINES, Here, run_ranks

from multiring._runtime.group.compile import Segments
from multiring._schedule import Collective, Kind

CASES = [
    Case(collective, dtype, "sum", rows, width=3, in_arena=in_arena, seed=rows)
    for collective in Collective
    for dtype, rows, in_arena in (("float32", 1000, False), ("bfloat16", 333, True), ("int64", 2, False))
] + [
    Case(Collective.ALL_REDUCE, "float32", "average", 900_000, seed=1),
    Case(Collective.ALL_REDUCE, "float32", "sum", 0, seed=2),
    Case(Collective.BROADCAST, "int8", "sum", 77_777, root=1, seed=3),
]


def compare_logs(here: Here) -> int:
    """Check that the executor's log equals the Schedule's moves; return their number."""
    group = here.join(log_moves=True, lower=False)
    compared = 0
    for case in CASES:
        request = case.request(here.rank, here.size)
        plan = group._calls.plan_of(request)
        schedule = plan.schedule
        case.run(group, place(group, case.operand(here.rank, here.size), in_arena=case.in_arena))
        # Segments run concurrently. Within a segment, moves run in the order of the schedule.
        log = sorted(group._calls.latest.log, key=lambda entry: entry.segment)
        moves, segments = schedule.moves_of(here.rank), Segments.of(plan, request)
        sizes = [segments.each] * (segments.count - 1) + [segments.last]
        want = [
            (None, index, *entry)
            for index, counts in enumerate(sizes)
            for entry in expected_log(moves, schedule.extents_of(here.rank, counts), case)
        ]
        assert log == want, f"{case}: the executor did {log}, want {want}"
        compared += len(want)
    return compared


def expected_log(moves: Any, extents: Any, case: Case) -> list[tuple[int, int]]:
    """Return (move, bytes sent to all its peers) for each move of the Schedule."""
    itemsize = case.operand(0, 2).itemsize
    want = []
    for index, move in enumerate(moves.rows()):
        first = move.src if move.kind is Kind.SEND else move.dst
        size = int(extents.count[first : first + move.span].sum()) * itemsize
        want.append((index, size * len(move.peers)))
    return want


@pytest.mark.parametrize(("engine", "ranks"), [*itertools.product(ENGINES, (2, 3, 4)), ("mpi", 3)])
def test_log_equals_schedule(engine: str, ranks: int) -> None:
    assert min(run_ranks(compare_logs, ranks, engine=engine)) > len(CASES)


def lowered_and_not(here: Here) -> list[list[Any]]:
    """Return the logs of all_reduces in an arena, in ordinary memory, and in ordinary memory too large for staging."""
    group = here.join(log_moves=True)
    logs = []
    for array in (group.allocate(10_000, "float32"), np.empty(10_000, np.float32), np.empty(3_000_000, np.float32)):
        array[:] = here.rank
        group.all_reduce(array)
        assert (array == sum(range(here.size))).all()
        logs.append(group._calls.latest.log)
    return logs


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_only_what_lies_in_arenas_of_one_host_is_lowered_and_the_log_says_so(engine: str) -> None:
    for arena, ordinary, large in run_ranks(lowered_and_not, 3, engine=engine):
        if engine == "shm":
            assert [lowering for lowering, *_ in (*arena, *ordinary)] == ["slice", "staged_slice"]
            for *_, size_bytes in (*arena, *ordinary):
                assert 13_200 <= size_bytes <= 13_500  # a third of 40,000, cut at multiples of 64
        else:
            assert {lowering for lowering, *_ in (*arena, *ordinary)} == {"notes"}
        assert len(large) > 1
        assert all(lowering is None for lowering, *_ in large)


def no_log(here: Here) -> list[Any]:
    group = here.join()
    group.all_reduce(np.ones(10))
    return list(group._calls.latest.log)


def test_log_is_empty_unless_asked_for() -> None:
    assert run_ranks(no_log, 2) == [[], []]


def told_how(here: Here) -> list[str]:
    """Return the log lines of `join` about ordinary memory."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]  # the shortest of handlers
    logger = logging.getLogger("multiring")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    here.join()
    return [text for text in (record.getMessage() for record in records) if "ordinary" in text]


def test_the_log_says_which_way_ordinary_memory_goes() -> None:
    told = run_ranks(told_how, 2, read_peers=False)
    for rank, lines in enumerate(told):
        want = f"rank {rank}: large ordinary arrays are read in place by ranks [], through segments by [{1 - rank}]"
        assert lines == [want]
