"""What the executor did is what the Schedule says: each move, in order, with the bytes of its extents."""

from typing import Any

import numpy as np
import pytest
from tests.conformance.cases import Case, place
from tests.wire.ranks import ENGINES, Here, run_ranks

from multiring.schedule import Collective, Kind

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
    """Return how many moves the executor's log and the Schedule had in common: all of them."""
    group = here.join(log_moves=True)
    compared = 0
    for case in CASES:
        request = case.request(here.rank, here.size)
        schedule = group._programs.schedule_of(request)
        case.run(group, place(group, case.operand(here.rank, here.size), in_arena=case.in_arena))
        operation, _ = group._held[-1]
        want = expected_log(schedule.moves_of(here.rank), schedule.extents_of(here.rank, request.counts), case)
        assert operation.log == want, f"{case}: did {operation.log}, the schedule has {want}"
        compared += len(want)
    return compared


def expected_log(moves: Any, extents: Any, case: Case) -> list[tuple[int, int]]:
    """Return (move, bytes over all its peers) as the Schedule has them."""
    itemsize = case.operand(0, 2).itemsize
    want = []
    for index, move in enumerate(moves.rows()):
        first = move.src if move.kind is Kind.SEND else move.dst
        size = int(extents.count[first : first + move.span].sum()) * itemsize
        want.append((index, size * len(move.peers)))
    return want


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_log_equals_schedule(engine: str, ranks: int) -> None:
    assert min(run_ranks(compare_logs, ranks, engine=engine)) > len(CASES)


def no_log(here: Here) -> list[tuple[int, int]]:
    group = here.join()
    group.all_reduce(np.ones(10))
    operation, _ = group._held[-1]
    return operation.log


def test_log_is_empty_unless_asked_for() -> None:
    assert run_ranks(no_log, 2) == [[], []]
