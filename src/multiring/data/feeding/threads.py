"""Workers that are threads: they read and decode straight into the batch, wherever that is."""

import queue
import threading
import weakref
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, Job, Layout, Wanted, fill

_Queue = queue.SimpleQueue[Any]


class ThreadWorkers:
    """Threads of this process. Reading, decoding and copying let others run; Python code in a transform does not.

    Args:
        samples: the data set.
        layout: of its batches.
        workers: how many.
        allocate: gives a batch's arrays.
    """

    def __init__(self, samples: Samples, layout: Layout, workers: int, allocate: Allocate) -> None:
        self._layout = layout
        self._workers = workers
        self._allocate = allocate
        self._tasks: _Queue = queue.SimpleQueue()
        for number in range(workers):
            threading.Thread(
                target=_work, args=(samples, layout, self._tasks), daemon=True, name=f"multiring-data-{number}"
            ).start()
        # Threads know the queue only, so that they end when nobody feeds it any more.
        self._end = weakref.finalize(self, _end, self._tasks, workers)

    def start(self, wanted: Wanted) -> Job:
        """Begin to make a batch."""
        rows = len(wanted.numbers)
        arrays = {name: self._allocate((rows, *shape), dtype) for name, (shape, dtype) in self._layout.arrays.items()}
        job = Job(wanted=wanted, arrays=arrays)
        for begin, end in job.cut(self._workers):
            self._tasks.put((job, begin, end))
        return job

    def hand_over(self, job: Job) -> dict[str, Any]:
        """Return a finished batch's arrays."""
        return job.arrays

    def drop(self, job: Job) -> None:
        """Let go of a batch that nobody wants."""
        job.cancelled = True

    def close(self) -> None:
        """End the threads, each when it has done what it does."""
        self._end()


def _end(tasks: _Queue, workers: int) -> None:
    for _ in range(workers):
        tasks.put(None)


def _work(samples: Samples, layout: Layout, tasks: _Queue) -> None:
    while (task := tasks.get()) is not None:
        job, begin, end = task
        if job.cancelled:
            continue
        try:
            job.finish(begin, fill(samples, layout, job.arrays, begin, job.wanted.piece(begin, end)))
        except BaseException as error:  # noqa: BLE001 -- raised where the batch is waited for
            job.fail(error)
        del task, job
