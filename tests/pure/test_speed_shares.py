"""Shares of a batch by speed: all samples once, in proportion, and changed only for a gain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring._frontend.elastic.speed_shares import counts_by_speed, speeds_now
from multiring.errors import ArgumentError

SPEEDS = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 500), SPEEDS)
def test_counts(batch: int, speeds: list[float]) -> None:
    counts = counts_by_speed(batch, speeds)
    assert sum(counts) == batch
    assert min(counts) >= min(1, batch // len(speeds))
    for count, speed in zip(counts, speeds, strict=True):
        wanted = batch * speed / sum(speeds)
        assert count <= max(wanted, 1) + 1
        # What the slowest ranks get too much, because each has one, the others lack.
        assert count >= wanted * (1 - len(speeds) / batch) - 1


def test_counts_by_hand() -> None:
    assert counts_by_speed(96, [2.0, 1.0]) == [64, 32]
    assert counts_by_speed(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert counts_by_speed(2, [1.0, 1.0, 5.0]) == [0, 0, 2]
    with pytest.raises(ArgumentError, match="a batch of 0 samples"):
        counts_by_speed(0, [1.0])


def test_speeds_change_for_a_gain_only() -> None:
    assert speeds_now((), [(8, 2.0), (8, 1.0)]) == (4.0, 8.0)
    assert speeds_now((1.0, 1.0), [(8, 1.0), (8, 1.02)]) == (1.0, 1.0)  # 1 % would be gained
    assert speeds_now((4.0, 8.0), [(4, 1.0), (8, 1.0)]) == (4.0, 8.0)  # these are the right shares
    assert speeds_now((4.0, 8.0), [(4, 1.0), (8, 2.0)]) == (4.0, 4.0)
    assert speeds_now((4.0, 8.0), [(4, 1.0), (0, 0.0)]) == (4.0, 8.0)  # one has measured nothing
    assert speeds_now((4.0, 8.0), [(4, 1.0), (4, 1.0), (0, 0.0)]) == (1.0, 1.0, 1.0)
