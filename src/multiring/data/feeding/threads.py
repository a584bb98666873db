"""Workers that are threads: they read and decode straight into the batch, wherever that is."""

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import weakref
from collections import deque
from functools import partial
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, Array, Job, Layout, Wanted, fill, pieces_of
from multiring.errors import StateError

_HUGE = 1 << 22  # bytes from which on large pages pay
_Queue = queue.SimpleQueue[Any]


class WorkersEndedError(StateError):
    """The workers were closed before they had made a batch; other workers have to make it."""


class Recycled:
    """Memory for batches that is used again once nothing views it: a new page costs as much as a copy to it.

    Args:
        layout: of the batches.
        kept: how many pieces of memory are kept for further batches.
    """

    def __init__(self, layout: Layout, kept: int) -> None:
        self._layout, self._kept = layout, kept
        self._free: deque[mmap.mmap] = deque(maxlen=kept)

    def arrays(self, rows: int) -> dict[str, Array]:
        """Return a batch's arrays, by field."""
        _, size = self._layout.offsets(rows)
        try:
            memory = self._free.popleft()
        except IndexError:
            memory = None
        if memory is None or len(memory) < size:
            memory = mmap.mmap(-1, max(size, 1))
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:
                with contextlib.suppress(OSError):  # of a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
        owner = (ctypes.c_char * max(size, 1)).from_buffer(memory)
        views = self._layout.views(owner, 0, rows)
        # The memory alone is kept by it: a full deque drops the oldest, which is unmapped then.
        weakref.finalize(owner, self._free.append, memory).atexit = False
        return views


class ThreadWorkers:
    """Threads of this process. Reading, decoding and copying let others run; Python code in a transform does not.

    Args:
        samples: the data set.
        layout: of its batches.
        workers: how many.
        allocate: gives a batch's arrays; None for memory that is used again.
        ahead: how many batches are made before they are asked for.
    """

    def __init__(
        self, samples: Samples, layout: Layout, workers: int, allocate: Allocate | None, ahead: int = 2
    ) -> None:
        self.pid = os.getpid()  # a fork has no threads
        self.layout = layout
        self._pieces = partial(pieces_of, samples, layout, workers=workers)
        self._allocate = allocate
        self._recycled = Recycled(layout, ahead + 2)
        self._tasks: _Queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        for number in range(workers):
            threading.Thread(
                target=_work, args=(samples, layout, self._tasks), daemon=True, name=f"multiring-data-{number}"
            ).start()
        # Threads know the queue only, so that they end when nobody feeds it any more.
        self._end = weakref.finalize(self, _end, self._tasks, workers)

    @property
    def is_over(self) -> bool:
        """Return whether no batch can be made any more."""
        return not self._end.alive

    def start(self, wanted: Wanted) -> Job:
        """Begin to make a batch.

        Raises:
            WorkersEndedError: they were closed.
        """
        rows = len(wanted.numbers)
        if self._allocate is None:
            arrays = self._recycled.arrays(rows)
        else:
            arrays = {name: self._allocate((rows, *s), dtype) for name, (s, dtype) in self.layout.arrays.items()}
        job = Job(wanted=wanted, arrays=arrays)
        pieces = job.cut(self._pieces(rows))
        with self._lock:  # what is put behind the end is done by nobody
            if self.is_over:
                raise WorkersEndedError("the loader's threads were closed")
            for begin, end in pieces:
                self._tasks.put((job, begin, end))
        return job

    def hand_over(self, job: Job) -> dict[str, Any]:
        """Return a finished batch's arrays."""
        return job.arrays

    def drop(self, job: Job) -> None:
        """Let go of a batch that nobody wants."""
        job.cancelled = True

    def close(self) -> None:
        """End the threads once they have made the batches that were started."""
        with self._lock:
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
