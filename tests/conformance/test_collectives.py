"""Every collective on every engine gives the exact bits of its schedule, on every rank and in every run."""

import itertools
import math
from typing import Any
from unittest.mock import patch

import pytest
from tests.support.cases import DTYPES, Case, all_cases, assert_same, digest_of, place
from tests.support.ranks import ENGINES, Here, run_ranks

from multiring._schedule import OPS, Collective
from multiring.planner import plan as planner

SAME_ON_ALL = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_GATHER)
INTERPRETED_ROWS = 10_000  # larger cases are interpreted on one rank only, because the interpreter is slow


# Hosts of 2 + 1 ranks form one axis; hosts of 2 + 2 ranks form a grid. Two ranks of a host run every type, operation
# and size. The others run every second case, which still includes each type and operation in some size. Four ranks on
# one host, or each on its own, run in test_same_bits_in_every_run.
PLACES = [
    *(("shm", 1, 1), ("shm", 2, 1), ("shm", 3, 2)),
    *(("tcp", 2, 2), ("tcp", 3, 2), ("shm+tcp", 3, 2), ("shm+tcp", 4, 2)),
]
LARGER_PLACES = [("mpi", 3, 7), ("shm+mpi", 4, 7), ("shm", 8, 13), ("tcp", 5, 13), ("shm+tcp", 6, 13), ("shm", 18, 101)]


def conform(here: Here, every: int, most_rows: float = math.inf, *, compares: bool = True) -> list[tuple[Case, bytes]]:
    """Run each `every`-th case, compare it with the oracle and the interpreter, and return digests.

    With `compares=False`, only the caller compares the digests, with those of ranks that compared their results.
    """
    group = here.join()
    results = []
    cases = (case for case in all_cases(here.size) if case.rows <= most_rows)
    for number, case in enumerate(itertools.islice(cases, None, None, every)):
        plan = group._calls.plan_of(case.request(here.rank, here.size))
        array = place(group, case.operand(here.rank, here.size), in_arena=case.in_arena)
        result = case.run(group, array)
        if case.collective is Collective.ALL_REDUCE:  # a repeated call runs on another code path
            again = place(group, case.operand(here.rank, here.size), in_arena=case.in_arena)
            assert_same(case.run(group, again), result, case)
        if not compares:
            results.append((case, digest_of(result)))
            continue
        # For results equal on all ranks, one rank runs the check; equal digests extend it to the other ranks.
        if case.collective not in SAME_ON_ALL or number % here.size == here.rank:
            case.check(result, here.rank, here.size, len(plan.schedule.grid))
            if case.rows <= INTERPRETED_ROWS or number % here.size == here.rank:
                assert_same(result, case.reference(plan, here.rank, here.size), case)
        results.append((case, digest_of(result)))
    return results


@pytest.mark.parametrize(("engine", "ranks", "every"), PLACES)
def test_every_collective(engine: str, ranks: int, every: int) -> None:
    by_rank = run_ranks(conform, ranks, every, engine=engine)
    reductions = {(case.dtype, case.op) for case, _ in by_rank[0] if case.collective is Collective.ALL_REDUCE}
    assert len(reductions) == len(DTYPES) * len(OPS) - 1  # bools have no average
    _assert_same_on_all(by_rank)


def unchecked(here: Here, every: int) -> list[tuple[Case, bytes]]:
    return conform(here, every, compares=False)


def test_every_way_through_a_host() -> None:
    """Fused kernels and single copies run by default; without them, the results have the same bits."""
    fast = run_ranks(conform, 3, 7)
    paths: list[dict[str, Any]] = [{"lower": False}, {"read_peers": False}, {"lower": False, "read_peers": False}]
    for path in paths:
        slow = run_ranks(unchecked, 3, 7, **path)
        assert slow == fast, path
        _assert_same_on_all(slow)


def conform_in_segments(here: Here, every: int, segment_bytes: int) -> list[tuple[Case, bytes]]:
    with patch.object(planner, "segments_of", lambda *_: (segment_bytes,)):
        return conform(here, every, most_rows=40 * segment_bytes)


@pytest.mark.parametrize(("engine", "ranks", "segment_bytes"), [("tcp", 3, 9000), ("shm+tcp", 4, 64)])
def test_many_segments(engine: str, ranks: int, segment_bytes: int) -> None:
    """Operations of more segments than lanes, some of a few elements only, give the bits of their schedule."""
    _assert_same_on_all(run_ranks(conform_in_segments, ranks, 5, segment_bytes, engine=engine))


@pytest.mark.parametrize(("engine", "ranks", "every"), LARGER_PLACES)
def test_more_places(engine: str, ranks: int, every: int) -> None:
    """Larger jobs, such as 18 ranks of one host on a grid of 6 x 3."""
    _assert_same_on_all(run_ranks(conform, ranks, every, engine=engine))


def _assert_same_on_all(by_rank: list[list[tuple[Case, bytes]]]) -> None:
    for results in zip(*by_rank, strict=True):
        case = results[0][0]
        if case.collective in SAME_ON_ALL:
            assert len({digest for _, digest in results}) == 1, f"{case}: the ranks' bits differ"


@pytest.mark.parametrize("engine", ENGINES)
def test_same_bits_in_every_run(engine: str) -> None:
    first, second = (run_ranks(each, 4, 11, engine=engine) for each in (conform, unchecked))
    assert first == second
