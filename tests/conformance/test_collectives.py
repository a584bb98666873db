"""Every collective on every engine: right, to the bit of its schedule, on every rank and in every run."""

import itertools

import pytest
from tests.conformance.cases import Case, all_cases, assert_same, digest_of, place
from tests.wire.ranks import ENGINES, Here, run_ranks

from multiring.schedule import Collective

SAME_ON_ALL = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_GATHER)
INTERPRETED_ROWS = 10_000  # larger ones are interpreted on one rank only: it is slow


# Hosts of 2 + 1 ranks lie on one axis, of 2 + 2 on a grid.
PLACES = [*(("shm", p) for p in (1, 2, 3, 4)), *(("tcp", p) for p in (2, 3, 4)), ("shm+tcp", 3), ("shm+tcp", 4)]
LARGER_PLACES = [("shm", 8), ("tcp", 5), ("shm+tcp", 6)]


def conform(here: Here, every: int) -> list[tuple[Case, bytes]]:
    """Run each `every`-th case, compare with oracle and interpreter, and return the bits in brief."""
    group = here.join()
    results = []
    for number, case in enumerate(itertools.islice(all_cases(here.size), None, None, every)):
        schedule = group._calls.schedule_of(case.request(here.rank, here.size))
        array = place(group, case.operand(here.rank, here.size), in_arena=case.in_arena)
        result = case.run(group, array)
        # Where all ranks have the same, equal digests carry one rank's check to the others.
        if case.collective not in SAME_ON_ALL or number % here.size == here.rank:
            case.check(result, here.rank, here.size, len(schedule.grid))
            if case.rows <= INTERPRETED_ROWS or number % here.size == here.rank:
                assert_same(result, case.reference(schedule, here.rank, here.size), case)
        results.append((case, digest_of(result)))
    return results


@pytest.mark.parametrize(("engine", "ranks"), PLACES)
def test_every_collective(engine: str, ranks: int) -> None:
    by_rank = run_ranks(conform, ranks, 1, engine=engine)
    assert len(by_rank[0]) > 400
    _assert_same_on_all(by_rank)


@pytest.mark.parametrize("path", [{"lower": False}, {"read_peers": False}, {"lower": False, "read_peers": False}])
def test_every_way_through_a_host(path: dict[str, bool]) -> None:
    """Fused kernels and single copies are what runs by default; the bits are the same without them."""
    slow, fast = run_ranks(conform, 3, 3, **path), run_ranks(conform, 3, 3)
    assert slow == fast
    _assert_same_on_all(slow)


@pytest.mark.parametrize(("engine", "ranks"), LARGER_PLACES)
def test_more_ranks(engine: str, ranks: int) -> None:
    _assert_same_on_all(run_ranks(conform, ranks, 13, engine=engine))


def _assert_same_on_all(by_rank: list[list[tuple[Case, bytes]]]) -> None:
    for results in zip(*by_rank, strict=True):
        case = results[0][0]
        if case.collective in SAME_ON_ALL:
            assert len({digest for _, digest in results}) == 1, f"{case}: the ranks' bits differ"


@pytest.mark.parametrize("engine", ENGINES)
def test_same_bits_in_every_run(engine: str) -> None:
    first, second = (run_ranks(conform, 4, 5, engine=engine) for _ in range(2))
    assert first == second


def test_grid_on_one_host() -> None:
    """18 ranks of one host lie on a grid of 6 x 3."""
    _assert_same_on_all(run_ranks(conform, 18, 61))
