"""Workers that are threads: they read and decode directly into the batch's arrays."""

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, Array, BatchJob, BatchLayout, fill, fill_together, pieces_of
from multiring.data.feeding.wanted import WantedSamples
from multiring.errors import StateError

_HUGE = 1 << 22  # bytes of a batch from which huge pages are worth their cost
# Waking a worker and Python's work on a batch take 0.5 ms of the trainer's time, however small the batch is. So small
# batches that need no decoding are made in groups: of at most so many bytes, and so many batches.
_TOGETHER_BYTES, _TOGETHER = 1 << 18, 8
_Queue = queue.SimpleQueue[Any]


class WorkersEndedError(StateError):
    """The workers were closed before they finished a batch; new workers must make it."""


class Recycled:
    """Memory for batches that is reused once no array views it.

    Reuse pays because a new page costs as much time as a copy into it.

    Args:
        layout: the layout of the batches.
        kept: how many free pieces of memory are kept for later batches.
    """

    def __init__(self, layout: BatchLayout, kept: int) -> None:
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
                with contextlib.suppress(OSError):  # the kernel may have no huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
        owner = (ctypes.c_char * max(size, 1)).from_buffer(memory)
        views = self._layout.views(owner, 0, rows)
        # The finalizer keeps only the memory alive. A full deque drops its oldest memory, which is then unmapped.
        weakref.finalize(owner, self._free.append, memory).atexit = False
        return views


class ThreadWorkers:
    """Worker threads of this process.

    Reading, decoding and copying release Python's GIL, so threads do them in parallel. Python code in a transform holds
    the GIL.

    Args:
        samples: the data set.
        layout: the layout of its batches.
        rows: the rows of a usual batch.
        workers: the number of threads.
        allocate: allocates an array of a batch; None to reuse the memory of earlier batches.
        ahead: how many batches are made ahead of time.
    """

    def __init__(
        self, samples: Samples, layout: BatchLayout, rows: int, workers: int, allocate: Allocate | None, ahead: int = 2
    ) -> None:
        self.pid = os.getpid()  # to detect a fork: a forked process has no worker threads
        self.layout = layout
        self._pieces = partial(pieces_of, samples, layout, workers=workers)
        self._allocate = allocate
        # Samples that are read one by one would keep one worker busy with a whole group, while the others have nothing.
        listed = None if allocate is not None else getattr(samples, "listed_bytes", None)
        fit = 0 if listed is None else int(_TOGETHER_BYTES // max(1.0, rows * (layout.row_bytes + listed)))
        self.together = max(1, min(fit, _TOGETHER))  # batches that are best begun at once
        self._recycled = Recycled(layout, ahead + 2)
        self._tasks: _Queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        for number in range(workers):
            threading.Thread(
                target=_work, args=(samples, layout, self._tasks), daemon=True, name=f"multiring-data-{number}"
            ).start()
        # The threads refer only to the queue, so that this object can be collected. Its finalizer then ends them.
        self._end = weakref.finalize(self, _end, self._tasks, workers)

    @property
    def is_over(self) -> bool:
        """Return whether the threads are closed."""
        return not self._end.alive

    def start(self, wanted: WantedSamples) -> BatchJob:
        """Start to make a batch.

        Raises:
            WorkersEndedError: the threads were closed.
        """
        rows = len(wanted.numbers)
        if self._allocate is None:
            arrays = self._recycled.arrays(rows)
        else:
            arrays = {name: self._allocate((rows, *s), dtype) for name, (s, dtype) in self.layout.arrays.items()}
        job = BatchJob(wanted=wanted, arrays=arrays)
        self._put(_Piece(job, begin, end) for begin, end in job.cut(self._pieces(rows)))
        return job

    def start_all(self, wanted: Sequence[WantedSamples]) -> list[BatchJob]:
        """Start to make several batches of an epoch.

        Raises:
            WorkersEndedError: the threads were closed.
        """
        if self.together == 1 or len(wanted) == 1:
            return [self.start(each) for each in wanted]
        whole, end, jobs = self._recycled.arrays(sum(len(each.numbers) for each in wanted)), 0, []
        for each in wanted:
            begin, end = end, end + len(each.numbers)
            jobs.append(BatchJob(wanted=each, arrays={name: array[begin:end] for name, array in whole.items()}))
            jobs[-1].cut(1)
        self._put([_Batches(jobs, whole)])
        return jobs

    def _put(self, tasks: "Iterable[_Piece | _Batches]") -> None:
        with self._lock:  # `close` queues end marks under this lock; no thread would take a task behind the marks
            if self.is_over:
                raise WorkersEndedError("the loader's threads were closed")
            for each in tasks:
                self._tasks.put(each)

    def hand_over(self, job: BatchJob) -> dict[str, Any]:
        """Return a finished batch's arrays."""
        return job.arrays

    def drop(self, job: BatchJob) -> None:
        """Cancel a batch that is no longer needed."""
        job.cancelled = True

    def close(self) -> None:
        """Stop the threads after they have finished the started batches."""
        if os.getpid() != self.pid:  # the threads are the parent's, and one of them may have had the lock at the fork
            self._end.detach()
            return
        with self._lock:
            self._end()


def _end(tasks: _Queue, workers: int) -> None:
    for _ in range(workers):
        tasks.put(None)


def _work(samples: Samples, layout: BatchLayout, tasks: _Queue) -> None:
    while (task := tasks.get()) is not None:
        task.make(samples, layout)
        del task


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a batch: a worker's task."""

    job: BatchJob
    begin: int
    end: int

    def make(self, samples: Samples, layout: BatchLayout) -> None:
        job = self.job
        if job.cancelled:
            return
        try:
            filled = fill(samples, layout, job.arrays, self.begin, job.wanted.piece(self.begin, self.end))
            job.finish(self.begin, filled)
        except BaseException as error:  # noqa: BLE001 -- raised again by the thread that waits for the batch
            job.fail(error)


@dataclass(frozen=True, slots=True)
class _Batches:
    """Whole batches: a worker's task. `arrays` has the rows of all of them."""

    jobs: Sequence[BatchJob]
    arrays: Mapping[str, Array]

    def make(self, samples: Samples, layout: BatchLayout) -> None:
        try:
            found = None
            if not any(job.cancelled for job in self.jobs):
                found = fill_together(samples, layout, self.arrays, [job.wanted for job in self.jobs])
        except BaseException as error:  # noqa: BLE001 -- as above
            for job in self.jobs:
                job.fail(error)
            return
        for number, job in enumerate(self.jobs):
            if found is not None:
                job.finish(0, found[number])
            else:
                _Piece(job, 0, len(job.wanted.numbers)).make(samples, layout)
