"""The review of measured against predicted times: the links that it names, and the corrected constants."""

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring._runtime.rails.watch import busy_seconds
from multiring._topology import Topology
from multiring.planner.review import Constants, Review

HOSTS = Topology(((0, 1), (2, 3), (4, 5)), names=("a", "b", "c"))


def table(ratio: float, rates: list[list[float]]) -> NDArray[np.float64]:
    return np.array([[ratio, 1.0, *rates[rank // 2]] for rank in range(6)])


EVEN = table(3.0, [[0, 100, 1], [1, 0, 100], [100, 1, 0]])
SLOW_B = table(3.0, [[0, 100, 100], [20, 0, 20], [100, 100, 0]])


def test_one_check_alone_changes_nothing() -> None:
    review = Review(HOSTS)
    assert review.check(EVEN) is None
    assert review.check(table(1.4, [[0] * 3] * 3)) is None
    assert review.check(EVEN) is None
    assert review.check(np.zeros((6, 5))) is None  # zeros count neither for nor against a change
    assert review.check(EVEN) is not None


def test_where_no_host_is_slower_all_rails_carry_less() -> None:
    review = Review(HOSTS)
    review.check(EVEN)
    found = review.check(EVEN)
    assert found is not None
    assert (found.ratio, found.hosts) == (3.0, ())
    assert found.constants == Constants(of_all=1 / 3)
    (rail,) = found.constants.applied(HOSTS).rails
    assert rail.bandwidth_bytes_per_s == pytest.approx(HOSTS.rails[0].bandwidth_bytes_per_s / 3)


def test_a_slow_host_is_named_and_alone_carries_less_until_that_does_not_explain_it() -> None:
    review = Review(HOSTS)
    review.check(SLOW_B)
    found = review.check(SLOW_B)
    assert found is not None
    assert found.hosts == ("host b (ranks [2, 3]), whose best connection carries 2e-05 instead of 0.0001 MB/s",)
    applied = found.constants.applied(HOSTS)
    assert applied.rails == HOSTS.rails
    assert [own.host for own in applied.own_rails] == [1]
    assert applied.rails_of(1)[0].bandwidth_bytes_per_s == pytest.approx(HOSTS.rails[0].bandwidth_bytes_per_s / 5)
    review.check(SLOW_B)
    again = review.check(SLOW_B)
    assert again is not None
    assert again.constants == Constants(of_all=1 / 3, of_host=((1, 0.2),))


def test_of_two_hosts_the_sender_is_slow() -> None:
    review = Review(Topology(((0,), (1,))))
    rows = np.array([[2.0, 1.0, 0, 10], [2.0, 1.0, 100, 0]])
    review.check(rows)
    found = review.check(rows)
    assert found is not None
    assert found.hosts == ("host (ranks [0]), whose best connection carries 1e-05 instead of 0.0001 MB/s",)


def test_time_side_by_side_counts_once() -> None:
    assert busy_seconds([(5, 6), (1, 3), (2, 4)]) == 4


# In the rings, 0 sends to 1, 1 to 2, and 2 to 0. The other entries come from agreements.
@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ([[0, 20, 1], [1, 0, 20], [100, 1, 0]], "b"),  # slow in both directions
        ([[0, 100, 1], [1, 0, 20], [100, 1, 0]], "b"),  # b sends slowly
        ([[0, 20, 100], [100, 0, 100], [100, 20, 0]], "b"),  # b receives slowly from all
    ],
)
def test_who_is_slow_is_told_from_its_neighbours(rates: list[list[float]], named: str) -> None:
    review = Review(HOSTS)
    review.check(table(3.0, rates))
    found = review.check(table(3.0, rates))
    assert found is not None
    assert [host.split()[1] for host in found.hosts] == [named]


def test_a_host_is_not_slow_that_carries_what_is_stated() -> None:
    (rail,) = HOSTS.rails
    known = Constants(of_host=((1, 0.2),)).applied(HOSTS)
    review = Review(known)
    full = rail.bandwidth_bytes_per_s
    rows = table(3.0, [[0, full * 4, 0], [full / 5, 0, full / 5], [full, 0, 0]])  # a burst at 4 times the rate
    review.check(rows)
    found = review.check(rows)
    assert found is not None
    assert found.hosts == ()
