"""Ranks agree on the operation at which to switch: the largest position that any rank has posted."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._runtime.named.order_switch import Switch, tree_neighbours


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_all_go_up_to_the_most_posted(posted: list[int], chance: random.Random) -> None:
    size = len(posted)
    switches = [Switch(rank, size) for rank in range(size)]
    lines: dict[tuple[int, int], deque[int]] = {}
    sent = [0] * size

    def send(sender: int, counts: Sequence[tuple[int, int]]) -> None:
        for to, count in counts:
            assert to in tree_neighbours(sender, size)
            lines.setdefault((sender, to), deque()).append(count)
            sent[sender] += 1

    for rank in chance.sample(range(size), size):
        send(rank, switches[rank].begin(posted[rank]))
        while waiting := [line for line, counts in lines.items() if counts]:
            sender, to = chance.choice(waiting)
            send(to, switches[to].take(sender, lines[sender, to].popleft()))
    assert {each.agreed for each in switches} == {max(posted)}
    assert all(count == len(tree_neighbours(rank, size)) for rank, count in enumerate(sent))


def test_strangers_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 30 is not next to this rank"):
        Switch(1, 40).take(30, 7)
