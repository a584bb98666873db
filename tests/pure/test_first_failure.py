"""Which of the ranks' ends is the failure that ended a job."""

import pytest

from multiring._launch.first_failure import CULPRIT_S, Ended, RankEnds, end_in
from multiring._launch.pickled_call import Failure, Returned, pickled_outcome
from multiring.errors import LaunchError

CAUSE = Failure("Traceback: ValueError: no", ValueError("no"), is_consequence=False)
LOST = Failure("Traceback: PeerLostError: rank 1 died", None, is_consequence=True)


def test_results_come_by_rank() -> None:
    ends = RankEnds(2)
    ends.add(1, Returned("b"), 0.0)
    assert (ends.missing, ends.are_complete, ends.has_failed) == ([0], False, False)
    ends.add(0, Returned("a"), 1.0)
    assert (ends.are_complete, ends.results(), ends.is_decided(9.0)) == (True, ["a", "b"], False)


def test_a_cause_decides_at_once_and_keeps_its_exception() -> None:
    ends = RankEnds(3)
    ends.add(2, CAUSE, 0.0)
    assert ends.is_decided(0.0)
    error = ends.error("failed")
    assert str(error) == "failed: rank 2 raised\nTraceback: ValueError: no"
    assert error.__cause__ is CAUSE.error
    ends.add(0, Returned(1), 1.0)
    ends.add(1, Returned(1), 1.0)
    with pytest.raises(LaunchError, match="rank 2 raised"):
        ends.results()


def test_a_consequence_waits_for_its_cause() -> None:
    ends = RankEnds(3)
    ends.add(0, LOST, 10.0)
    assert ends.has_failed
    assert not ends.is_decided(10.0 + CULPRIT_S - 0.1)
    assert ends.is_decided(10.0 + CULPRIT_S)  # the cause never comes
    assert "rank 0 raised\nTraceback: PeerLostError" in str(ends.error("failed"))
    ends.add(1, Ended("was killed by SIGKILL"), 11.0)
    assert ends.is_decided(11.0)
    assert str(ends.error("failed")).startswith("failed: rank 1 was killed by SIGKILL\nrank 0 raised")


def test_only_consequences_are_decided_once_all_have_ended() -> None:
    ends = RankEnds(1)
    ends.add(0, LOST, 0.0)
    assert ends.is_decided(0.0)


def test_the_first_end_of_a_rank_counts() -> None:
    ends = RankEnds(1)
    ends.add(0, Returned(7), 0.0)
    ends.add(0, CAUSE, 1.0)
    assert ends.results() == [7]


def test_an_end_that_cannot_be_unpickled_is_an_end() -> None:
    assert end_in(pickled_outcome(Ended("was stopped"))) == Ended("was stopped")
    broken = end_in(b"no pickle")
    assert isinstance(broken, Ended)
    assert "cannot be unpickled here" in broken.text
