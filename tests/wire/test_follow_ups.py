"""What follows an agreement: its order, its outcome on all ranks, and an agreement that fails."""

import threading
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.ranks import Here, run_ranks

from multiring._frontend.follow_ups import FollowUps
from multiring.errors import MismatchError


def follow(here: Here) -> list[tuple[int, int, float]]:
    """Return each follow-up's number, the agreed flag, and a sum over the ranks."""
    group = here.join()
    agreements, follow_ups = group.twin(), FollowUps(group)
    found: list[tuple[int, int, float]] = []
    ended = threading.Semaphore(0)

    def reduce(number: int, flag: NDArray[np.uint8]) -> None:
        array = np.full(3, float(number + here.rank))
        handle = follow_ups.staged.all_reduce_async(array)

        def take() -> None:
            handle.wait()
            found.append((number, int(flag[0]), float(array[0])))
            ended.release()

        threading.Thread(target=take).start()

    handles = []
    for number in range(8):
        flag = np.array([number % 3 != here.rank], np.uint8)
        label = f"operation {number}" if number != 5 else f"rank {here.rank}"
        handles.append(follow_ups.agree(agreements, label, flag, partial(reduce, number, flag)))
    for number, handle in enumerate(handles):
        if number != 5:
            handle.wait()
            continue
        with pytest.raises(MismatchError):
            handle.wait()
    for _ in range(7):
        assert ended.acquire(timeout=20)
    follow_ups.close()
    return sorted(found)


def test_the_least_flag_decides_and_a_failed_agreement_has_no_follow_up() -> None:
    wanted = [(number, int(number % 3 == 2), 2.0 * number + 1) for number in range(8) if number != 5]
    assert run_ranks(follow, 2) == [wanted] * 2
