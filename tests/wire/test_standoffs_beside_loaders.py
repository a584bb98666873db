"""A loader's threads do not hide that ranks wait for each other, unless they run the program's code."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks
from tests.wire.test_standoffs import SETTINGS, SURE_S

import multiring
from multiring._runtime.job.threads import thread_states
from multiring.data import ArrayDataset, Loader
from multiring.data.readers.storage import RemoteStorage
from multiring.errors import StallError

LIMIT_S = 240.0


def loader_of(samples: Any) -> Loader:
    return Loader(samples, 4, workers=2)


def numbers() -> ArrayDataset:
    return ArrayDataset({"x": np.arange(400)}, shuffle=False)


class Stuck(ArrayDataset):
    """A data set whose samples do not come in a loader's thread before `go_on` is set."""

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__({"x": np.arange(400)})
        self._go_on = go_on
        self.has_begun = threading.Event()

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:
        if threading.current_thread().name.startswith("multiring-data"):  # the loader reads one for its layout
            self.has_begun.set()
            assert self._go_on.wait(LIMIT_S)
        return super().sample(number, epoch, draw)


def wait_in_two_groups(group: multiring.Group, rank: int) -> str:
    """Wait in another group than the other rank; return the error."""
    other = group.subgroup(range(2))
    assert other is not None
    group.barrier()
    with pytest.raises(StallError) as raised:
        other.barrier() if rank else group.barrier()
    time.sleep(1)  # the other rank may need a moment longer
    return str(raised.value)


def stand_beside_idle_threads(here: Here) -> str:
    group = here.join(**SETTINGS)
    batches = iter(loader_of(numbers()))
    next(batches)
    told = wait_in_two_groups(group, here.rank)
    assert next(batches)["x"].tolist() == [4, 5, 6, 7]
    return told


def stand_beside_a_silent_source(here: Here) -> str:
    group = here.join(**SETTINGS)
    answers = threading.Event()
    source = RemoteStorage("memory://nothing", timeout_s=2 * LIMIT_S, readers=1, options={})
    # As in a loader, one thread waits for the thread that asks the source. No line is the program's.
    reading = threading.Thread(target=source._asked, args=("a block", answers.wait), name="multiring-data-7")
    reading.start()
    while all(each.name != "multiring-source" for each in threading.enumerate()):
        time.sleep(0.01)
    told = wait_in_two_groups(group, here.rank)
    answers.set()
    reading.join(LIMIT_S)
    return told


@pytest.mark.parametrize("stand", [stand_beside_idle_threads, stand_beside_a_silent_source])
def test_a_standoff_is_found(stand: Callable[[Here], str]) -> None:
    for text in run_ranks(stand, 2):
        assert "rank 0 is at" in text, text
        assert "rank 1 is at" in text, text


def make_the_call_in_a_sample(here: Here) -> float:
    """Make the missing call in a loader's thread, long after the other rank has begun to wait."""
    group = here.join(**SETTINGS)
    other = group.subgroup(range(2))
    assert other is not None
    missing, array = other.all_reduce, np.ones(1)

    class Calls(ArrayDataset):
        def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:
            if number == 0:
                time.sleep(4 * SURE_S)
                missing(array)
            return super().sample(number, epoch, draw)

    group.barrier()
    if here.rank == 0:
        missing(array)
        group.barrier()
        return float(array[0])
    batches = iter(loader_of(Calls({"x": np.arange(8)}, shuffle=False)))
    threading.Thread(target=next, args=(batches,)).start()
    group.barrier()
    return float(array[0])


def test_a_sample_that_makes_the_call() -> None:
    assert run_ranks(make_the_call_in_a_sample, 2) == [2.0, 2.0]


def test_threads_count_while_they_run_the_programs_code() -> None:
    before = thread_states().others
    go_on = threading.Event()
    samples = Stuck(go_on)
    batches = iter(loader_of(samples))
    ended: list[Any] = []
    taking = threading.Thread(target=lambda: ended.append(next(batches)))
    taking.start()
    assert samples.has_begun.wait(LIMIT_S)
    during = thread_states().others
    go_on.set()
    taking.join(LIMIT_S)
    assert during >= before + 2  # the thread that takes a batch, and at least one of the loader's
    latest_s = time.monotonic() + LIMIT_S
    while thread_states().others > before:
        assert time.monotonic() < latest_s, "the loader's idle threads still count"
        time.sleep(0.01)
    assert len(ended[0]["x"]) == 4
