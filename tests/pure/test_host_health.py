"""Hosts that have failed twice get no newcomers for a while."""

from multiring._launch.host_health import HostHealth


class HandClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_second_failure_keeps_newcomers_off_for_longer_and_longer() -> None:
    clock = HandClock()
    health = HostHealth((10.0, 35.0), clock)
    assert health.note_failure("a") is None
    assert health.may_be_used("a")
    pauses = []
    for _ in range(4):
        clock.now_s += 100.0
        pauses.append(health.note_failure("a"))
        assert not health.may_be_used("a")
        assert health.may_be_used("b")
        clock.now_s += (pauses[-1] or 0.0) - 0.1
        assert not health.may_be_used("a")
        clock.now_s += 0.2
        assert health.may_be_used("a")
    assert pauses == [10.0, 20.0, 35.0, 35.0]


def test_ranks_that_are_lost_together_are_one_failure() -> None:
    clock = HandClock()
    health = HostHealth((10.0, 35.0), clock)
    assert [health.note_failure("a") for _ in range(4)] == [None] * 4
    assert health.may_be_used("a")
    clock.now_s = 1.5
    assert health.note_failure("a") == 10.0
