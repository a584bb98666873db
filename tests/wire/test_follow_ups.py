"""What follows an agreement: its order, its outcome on all ranks, and an agreement that fails."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

from multiring._frontend.follow_ups import NO, YES, FollowUps
from multiring.errors import MismatchError


class Reduction:
    """An operation whose follow-up sums a number over the ranks."""

    def __init__(self, follow_ups: FollowUps, here: Here, number: int, took: Callable[[int, int, float], None]) -> None:
        self.answer = YES if number % 3 != here.rank else NO
        self._follow_ups, self._rank, self._number, self._took = follow_ups, here.rank, number, took

    def begin(self) -> None:
        """Fail, as where a rank has died. What follows must come all the same."""
        raise AssertionError

    def follow(self) -> None:
        """Start the sum, and let a thread wait for it."""
        array = np.full(3, float(self._number + self._rank))
        handle = self._follow_ups.staged.all_reduce_async(array)

        def take() -> None:
            handle.wait()
            self._took(self._number, self.answer, float(array[0]))

        threading.Thread(target=take).start()


def follow(here: Here) -> list[tuple[int, int, float]]:
    """Return each follow-up's number, the agreed answer, and a sum over the ranks."""
    group = here.join()
    agreements, follow_ups = group.twin(), FollowUps(group)
    found: list[tuple[int, int, float]] = []
    ended = threading.Semaphore(0)

    def took(*result: Any) -> None:
        found.append(result)
        ended.release()

    handles = []
    for number in range(8):
        label = f"operation {number}" if number != 5 else f"rank {here.rank}"
        work = Reduction(follow_ups, here, number, took)
        handles.append(follow_ups.agree(agreements, label, work, is_tracked=True, is_ahead=number > 5))
    for number, handle in enumerate(handles):
        if number != 5:
            handle.wait()
            continue
        with pytest.raises(MismatchError):
            handle.wait()
    for _ in range(7):
        assert ended.acquire(timeout=240)
    follow_ups.close()
    return sorted(found)


def test_the_least_answer_decides_and_a_failed_agreement_has_no_follow_up() -> None:
    wanted = [(number, YES if number % 3 == 2 else NO, 2.0 * number + 1) for number in range(8) if number != 5]
    assert run_ranks(follow, 2) == [wanted] * 2
