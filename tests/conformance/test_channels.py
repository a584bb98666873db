"""Every algorithm over several channels, by every lowering: results and logs match interpreter and Schedule.

The planner uses several channels only between hosts with several rails, and only for a few algorithms. These tests
therefore pin their plans.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.cases import Case, assert_same, digest_of, place
from tests.support.ranks import Here, run_ranks

import multiring
from multiring._collectives import TABLE, build
from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.group.compile import task_of
from multiring._schedule import Collective, Frame, Kind, Schedule
from multiring._topology import grid_of
from multiring.errors import ScheduleError
from multiring.planner import Plan

SAME_ON_ALL = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_GATHER)
RAILS = "127.0.0.1,127.0.0.2"
SHARES = ((1,), (1, 1), (3, 1, 2))
KINDS = (("float64", "average"), ("bfloat16", "sum"), ("int16", "max"))
SIZES = {"logged": (0, 1, 40, 1000, 4097), "again": (1, 1000, 4097)}  # rows of all_reduces
OTHERS = [each for each in Collective if each is not Collective.ALL_REDUCE]
# The expected lowerings. An exchange that does not fit into a host's slots runs move by move (None).
PLACES = {
    ("shm", 3): {None, "exchange", "slice", "staged_slice"},
    ("tcp", 3): {None, "notes"},
    ("shm+tcp", 4): {None, "notes"},
}


def cases(how: str) -> Iterator[Case]:
    """Yield all_reduces of each kind and size, and a few cases of every other collective."""
    for seed, (kind, rows) in enumerate(itertools.product(KINDS, SIZES[how])):
        yield Case(Collective.ALL_REDUCE, *kind, rows, seed=seed)
    for seed, (collective, rows) in enumerate(itertools.product(OTHERS, (1, 300))):
        yield Case(collective, *KINDS[0], rows, seed=seed)


def schedules(group: multiring.Group, case: Case) -> Iterator[Schedule]:
    """Yield every algorithm's schedule for `case`, on one axis and on a grid if there is one, with several channels."""
    needed = task_of(case.request(group.rank, group.size)).accumulation
    order = grid_of(group.topology)[1]
    grids = [(group.size,), (2, group.size // 2)] if group.size % 2 == 0 else [(group.size,)]
    for (collective, algorithm), grid, shares in itertools.product(TABLE, grids, SHARES):
        if collective is not case.collective:
            continue
        try:
            yield build(algorithm, Frame(collective=collective, grid=grid, order=order, shares=shares), needed)
        except ScheduleError:  # the algorithm does not support this accumulation
            continue


def conform(here: Here, how: str) -> tuple[set[str | None], list[bytes]]:
    """Run the cases by each schedule. Log the moves, or repeat each all_reduce.

    Returns:
        The lowerings that ran, and digests of the results that must be the same on all ranks.
    """
    group = here.join(log_moves=how == "logged")
    ran: set[str | None] = set()
    digests: list[bytes] = []
    for case in cases(how):
        request = case.request(here.rank, here.size)
        for number, schedule in enumerate(schedules(group, case)):
            plan = Plan(schedule, "pinned", 1.0)
            group.pin(task_of(request), plan)
            array = place(group, case.operand(here.rank, here.size), in_arena=number % 3 == 0)
            result = case.run(group, array)
            if how == "logged":
                log = group._calls.latest.log
                lowering = log[0][0] if log else None
                assert log == expected(schedule, request, here.rank, lowering), f"{case} by {schedule}"
                ran.add(lowering)
            elif case.collective is Collective.ALL_REDUCE:  # a repeated call runs on another code path
                again = place(group, case.operand(here.rank, here.size), in_arena=number % 3 == 0)
                assert_same(case.run(group, again), result, (case, str(schedule)))
            # For results equal on all ranks, one rank runs the check; equal digests extend it to the other ranks.
            if case.collective not in SAME_ON_ALL or number % here.size == here.rank:
                assert_same(result, case.reference(plan, here.rank, here.size), (case, str(schedule)))
            if case.collective in SAME_ON_ALL:
                digests.append(digest_of(result))
    return ran, digests


def expected(
    schedule: Schedule, request: Any, rank: int, lowering: str | None
) -> list[tuple[str | None, int, int, int]]:
    """Return the log that the Schedule implies: all moves, or just reductions if a lowering replaces the others."""
    extents = schedule.extents_of(rank, request.counts)
    itemsize = numpy_dtype(request.dtype).itemsize
    whole = lowering in (None, "notes")
    rows = []
    for index, move in enumerate(schedule.moves_of(rank).rows()):
        first = move.src if move.kind is Kind.SEND else move.dst
        size = int(extents.count[first : first + move.span].sum()) * itemsize
        if whole or move.kind is Kind.REDUCE:
            rows.append((lowering, 0, index, size * (len(move.peers) if whole else 1)))
    return rows


@pytest.mark.parametrize("how", ["logged", "again"])
@pytest.mark.parametrize(("engine", "ranks"), PLACES)
def test_every_algorithm_over_channels(engine: str, ranks: int, how: str) -> None:
    rails = None if engine == "shm" else RAILS
    found = run_ranks(conform, ranks, how, engine=engine, rails=rails)
    assert all(ran == (PLACES[engine, ranks] if how == "logged" else set()) for ran, _ in found)
    digests = found[0][1]
    assert len(digests) > 100
    assert all(other == digests for _, other in found)
