"""Several connections on one rail (MULTIRING_CONNECTIONS), each with a thread of its own.

native/tests/connections_test.cc ends connections, silences them, and aborts operations while threads receive.
"""

import numpy as np
import pytest
from tests.support.programs import run
from tests.support.ranks import Here, report_of, run_ranks

from multiring.errors import MultiringError

SECRET = "a secret that is long enough"  # noqa: S105 -- of jobs that live for a second


def sums(here: Here) -> bool:
    """Return whether a sum of many segments and a message have the right values."""
    group = here.join()
    total = np.arange(1_000_000, dtype=np.float64) + group.rank
    group.all_reduce(total)
    right = bool((total == here.size * np.arange(1_000_000.0) + sum(range(here.size))).all())
    gathered = group.all_gather(np.array([group.rank]))
    return right and gathered.tolist() == list(range(here.size))


def error_of(here: Here) -> str:
    """Return the text of the error that joining raises; empty if there is none."""
    try:
        sums(here)
    except MultiringError as error:
        return str(error)
    return ""


def run_programs(here: Here, seeds: list[int]) -> int:
    """Run random programs."""
    group = here.join()
    for seed in seeds:
        run(group, seed, turns=3)
    return len(seeds)


@pytest.mark.parametrize(("connections", "seal"), [(2, 0), (4, 1)])
def test_random_programs(connections: int, seal: int) -> None:
    found = run_ranks(
        run_programs, 3, [7, 11], engine="tcp", connections=connections, seal=seal, secret=SECRET, deadline_s=240.0
    )
    assert found == [2] * 3


def test_hosts_of_several_ranks() -> None:
    assert run_ranks(run_programs, 4, [13], engine="shm+tcp", connections=4, deadline_s=240.0) == [1] * 4


@pytest.mark.parametrize("by_rank", [[4, 2, 4], [None, 3, None]])
def test_ranks_with_different_numbers_are_named_on_all_ranks(by_rank: list[int | None]) -> None:
    settings = [{} if number is None else {"connections": number} for number in by_rank]
    report = report_of(sums, 3, engine="tcp", by_rank=settings, init_timeout_s=60)
    for outcome in report.outcomes:
        text = str(outcome.error)
        assert "MULTIRING_CONNECTIONS must be the same on all ranks" in text, outcome
        assert f"{by_rank[1]} on ranks [1]" in text, outcome


def test_several_rails_have_one_connection_each() -> None:
    rails = "127.0.0.1,127.0.0.2"
    for error in run_ranks(error_of, 2, engine="tcp", rails=rails, connections=2, init_timeout_s=60):
        assert "MULTIRING_CONNECTIONS=2, but there are 2 rails" in error
    assert run_ranks(error_of, 2, engine="tcp", rails=rails, connections=1) == ["", ""]
