"""The end of a rank of multiring.dask.run, as its future tells it."""

import threading
from typing import Any

from multiring._launch.first_failure import Ended
from multiring._launch.pickled_call import Returned, pickled_outcome
from multiring.dask.job import _end_of


class Future:
    """A future with the two methods that are used; `result` waits for `has_come`, as Dask's does."""

    def __init__(self, result: Any = None) -> None:
        self.is_done = True
        self.has_come = threading.Event()
        self._result = result

    def done(self) -> bool:
        return self.is_done

    def result(self) -> Any:
        assert self.has_come.wait(240)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


def test_a_result_may_take_its_time() -> None:
    future = Future(pickled_outcome(Returned(7)))
    threading.Timer(1.0, future.has_come.set).start()
    assert _end_of(future) == Returned(7)


def test_a_worker_that_dies_with_its_result_does_not_block_the_driver() -> None:
    future = Future()
    threading.Timer(0.5, setattr, (future, "is_done", False)).start()
    assert _end_of(future) is None
    future.has_come.set()


def test_a_rank_that_runs_has_no_end() -> None:
    future = Future()
    future.is_done = False
    assert _end_of(future) is None


def test_a_cancelled_rank_is_lost() -> None:
    class Cancelled(BaseException):
        """As asyncio's."""

    future = Future(Cancelled("by the user"))
    future.has_come.set()
    assert _end_of(future) == Ended("is lost: Cancelled('by the user')")
