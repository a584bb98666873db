"""Detection of operations that became many times slower, before the ranks compare anything."""

import pytest

from multiring._runtime.rails.watch import SlowdownDetector

PREDICTED_S = 0.01


def noted(crawls: SlowdownDetector, *seconds: float) -> list[float | None]:
    return [crawls.note(each, PREDICTED_S) for each in seconds]


def test_the_third_slow_operation_in_a_row_is_worth_a_word() -> None:
    crawls = SlowdownDetector()
    assert noted(crawls, *[0.02] * 8, 2.0, 2.0) == [None] * 10
    assert noted(crawls, 2.0) == [pytest.approx(100.0)]
    assert noted(crawls, *[2.0] * 10) == [None] * 10  # the warning was given before


def test_what_was_always_slow_is_usual() -> None:
    # An unmeasured topology may promise any speed.
    assert noted(SlowdownDetector(), *[2.0] * 20) == [None] * 20


def test_single_ones_and_short_ones_are_not_worth_it() -> None:
    crawls = SlowdownDetector()
    assert noted(crawls, *[0.02] * 8, *[2.0, 2.0, 0.02] * 10) == [None] * 38
    short = SlowdownDetector()
    assert noted(short, *[0.001] * 8, *[0.05] * 10) == [None] * 18


def test_nothing_is_said_before_it_is_known_what_is_usual() -> None:
    assert noted(SlowdownDetector(), *[0.02] * 4, *[2.0] * 10) == [None] * 14
