"""Workers that are processes, for transforms in Python: the threads of one process would run them one at a time.

The workers write batches into an anonymous file in memory, which they share with this process. They report finished
pieces through pipes. If a worker dies, this process reports the death, starts another worker, and gives the dead
worker's pieces out again. The workers exit whenever the process that started them exits or dies.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from multiprocessing.util import is_exiting
from pathlib import Path
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, BatchJob, BatchLayout, Filled, fill, pieces_of
from multiring.data.feeding.threads import WorkersEndedError
from multiring.data.feeding.wanted import WantedSamples
from multiring.errors import DataError

# If this many workers die while they make the same piece, the piece is considered the cause, and its batch fails.
_DEATHS = 3
_JOIN_S = 5.0
_LOOK_S = 1.0  # seconds between a worker's checks of its parent, if the kernel has no notification of its exit
# The most rows of a piece that is sent to a busy worker. A longer piece could fill the pipe while the worker waits to
# send an answer, which would be a deadlock.
_SENT_AHEAD = 1024


@dataclass(slots=True)
class _Task:
    job: BatchJob
    begin: int
    end: int
    deaths: int = 0


@dataclass(slots=True)
class _Worker:
    number: int
    process: Any
    pipe: Connection
    tasks: "deque[_Task]"


@dataclass(frozen=True, slots=True)
class _Area:
    """A part of the shared file, for one batch."""

    begin: int
    memory: mmap.mmap


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerArguments:
    """The arguments of a worker process."""

    samples: Samples
    layout: BatchLayout
    rows: int  # rows of most batches
    spare: int  # how many batches the user may hold in shared memory; further batches are copied out of it
    context: str  # multiprocessing's start method: "forkserver", "spawn" or "fork"


class ProcessWorkers:
    """Worker processes, and the shared memory in which they make batches.

    Args:
        start: the arguments of the processes.
        workers: the number of processes.
        allocate: allocates an array into which a batch's data are copied; None to leave batches in shared memory.
        report: called with a message when a worker has died.
    """

    together = 1  # batches that are best begun at once

    def __init__(
        self, start: WorkerArguments, workers: int, allocate: Allocate | None, report: Callable[[str], None]
    ) -> None:
        self._start, self._allocate, self._report = start, allocate, report
        self.pid = os.getpid()
        self.layout = start.layout
        self._file = os.memfd_create("multiring-data", os.MFD_CLOEXEC)
        # Areas are added when batches need them, so that concurrent iterations never wait for each other.
        self._areas: list[_Area] = []
        self._free: list[int] = []
        self._waiting: deque[_Task] = deque()
        # Re-entrant, because garbage collection can free a batch in a thread that already holds the lock.
        self._lock = threading.Condition(threading.RLock())
        self._closed = False
        self._broken: BaseException | None = None
        self._idle_deaths = 0  # of workers without a sample to read, since the last answer of a worker
        self._held = 0  # areas of memory that the user's batches still view
        self._context: Any = multiprocessing.get_context(start.context)
        self._wake, self._woken = self._context.Pipe()
        self._workers: list[_Worker] = []
        for number in range(workers):
            self._workers.append(self._begun(number))
        self._thread = threading.Thread(target=self._serve, daemon=True, name="multiring-data")
        self._thread.start()

    def _begun(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        told = pickle.dumps(self._start)
        # A spawned process gets the file's descriptor from multiprocessing. A forked process inherits it, and also ends
        # of other workers' pipes. It must close them, or workers would not notice that this process has closed a pipe.
        is_fork = self._start.context == "fork"
        file: Any = self._file if is_fork else DupFd
        inherited = [ours, self._wake, self._woken, *(each.pipe for each in self._workers)] if is_fork else []
        process: Any = self._context.Process(
            target=_work,
            args=(theirs, told, _Descriptor(self._file, file), self.pid, inherited),
            daemon=True,
            name=f"data worker {number}",
        )
        process.start()
        theirs.close()
        return _Worker(number, process, ours, deque())

    @property
    def is_over(self) -> bool:
        """Return whether the processes were closed or have failed."""
        return self._closed or self._broken is not None

    def start(self, wanted: WantedSamples) -> BatchJob:
        """Start to make a batch.

        Raises:
            WorkersEndedError: the processes were closed or have failed.
        """
        rows = len(wanted.numbers)
        with self._lock:
            if self.is_over:
                raise WorkersEndedError("the loader's processes were closed")
            slot = self._area(max(rows, self._start.rows))
            pieces = pieces_of(self._start.samples, self._start.layout, rows, len(self._workers))
            job = BatchJob(wanted=wanted, arrays=self._start.layout.views(self._areas[slot].memory, 0, rows), slot=slot)
            self._waiting += [_Task(job, begin, end) for begin, end in job.cut(pieces)]
        self._wake_up()
        return job

    def start_all(self, wanted: Sequence[WantedSamples]) -> list[BatchJob]:
        """Start to make several batches.

        Raises:
            WorkersEndedError: the processes were closed or have failed.
        """
        return [self.start(each) for each in wanted]

    def _area(self, rows: int) -> int:
        """Return the number of a free area that holds `rows` rows; add an area if there is none."""
        _, needed = self._start.layout.offsets(rows)
        size = -(-max(needed, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        for slot in reversed(self._free):
            if len(self._areas[slot].memory) >= size:
                self._free.remove(slot)
                return slot
        begin = sum(len(each.memory) for each in self._areas)
        os.ftruncate(self._file, begin + size)
        self._areas.append(_Area(begin, mmap.mmap(self._file, size, offset=begin)))
        return len(self._areas) - 1

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # another thread may have closed the pipe
            self._wake.send_bytes(b"\0")

    def hand_over(self, job: BatchJob) -> dict[str, Any]:
        """Return a finished batch's arrays. Their memory is reused once nothing views it."""
        with self._lock:
            # The user may keep any number of batches, and the shared memory never shrinks: copy batches beyond `spare`.
            is_scarce = self._held >= self._start.spare
            self._held += not is_scarce and self._allocate is None
        rows = len(job.wanted.numbers)
        if self._allocate is not None or is_scarce:
            copies = {}
            for name, array in job.arrays.items():
                copies[name] = array.copy() if self._allocate is None else self._allocate(array.shape, array.dtype)
                copies[name][...] = array
            self._give_back(job)
            return copies
        memory = self._areas[job.slot].memory
        owner = (ctypes.c_char * len(memory)).from_buffer(memory)
        views = self._start.layout.views(owner, 0, rows)
        weakref.finalize(owner, self._let_go, job).atexit = False
        job.arrays = {}
        return views

    def _let_go(self, job: BatchJob) -> None:
        if os.getpid() != self.pid:
            return  # in a forked process, the lock may be held forever by a thread that does not exist there
        with self._lock:
            self._held -= 1
        self._give_back(job)

    def _give_back(self, job: BatchJob) -> None:
        job.arrays = {}
        with self._lock:
            if job.slot >= 0:  # the area is not free yet
                self._free.append(job.slot)
                job.slot = -1

    def drop(self, job: BatchJob) -> None:
        """Cancel a batch, and free its memory once no worker writes into it."""
        job.cancelled = True
        if os.getpid() != self.pid:
            return
        with self._lock:
            dropped = [each for each in self._waiting if each.job is job]
            self._waiting = deque(each for each in self._waiting if each.job is not job)
            if not self._is_being_made(job):
                self._give_back(job)
                return
        for each in dropped:
            job.finish(each.begin, Filled(lists={}, failures=[]))
        threading.Thread(target=self._drained, args=(job,), daemon=True, name="multiring-data-drop").start()

    def _is_being_made(self, job: BatchJob) -> bool:
        return any(task.job is job for each in self._workers for task in each.tasks)

    def _drained(self, job: BatchJob) -> None:
        with self._lock:
            while self._is_being_made(job) and not self.is_over:
                self._lock.wait(0.1)
        self._give_back(job)

    def close(self) -> None:
        """Stop the processes. Unfinished batches fail with WorkersEndedError."""
        if os.getpid() != self.pid:
            self._closed = True  # in a forked process: the workers belong to the parent
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._fail_all(WorkersEndedError("the loader's processes were closed"))
        self._wake_up()
        if threading.current_thread() is not self._thread:  # garbage collection may call `close` in this thread
            self._thread.join(_JOIN_S)
        for each in self._workers:
            each.pipe.close()
        for each in self._workers:
            with contextlib.suppress(ValueError):  # a worker that died and could not be replaced is already closed
                _end(each.process)
        os.close(self._file)
        self._wake.close()
        self._woken.close()

    def _fail_all(self, error: BaseException) -> None:
        for task in [*self._waiting, *(task for each in self._workers for task in each.tasks)]:
            task.job.fail(error)

    # ---- the thread that sends pieces to workers ----

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._give_out()
                ready = wait([self._woken, *(each.pipe for each in self._workers)])
                if self._woken in ready:
                    self._woken.recv_bytes()
                for worker in list(self._workers):
                    if worker.pipe in ready and not self._closed:
                        self._hear(worker)
        except BaseException as error:  # noqa: BLE001 -- raised again by the threads that wait for batches
            with self._lock:
                if not self._closed:
                    self._broken = error
                    self._fail_all(error)

    def _give_out(self) -> None:
        with self._lock:
            # Each worker gets two pieces, so that it can begin the second piece at once when it has finished the first.
            for depth in range(2):
                for worker in self._workers:
                    if self._waiting and len(worker.tasks) <= depth:
                        task = self._waiting[0]
                        if worker.tasks and task.end - task.begin > _SENT_AHEAD:
                            continue
                        worker.tasks.append(self._waiting.popleft())
                        wanted, area = task.job.wanted, self._areas[task.job.slot]
                        piece = wanted.piece(task.begin, task.end)
                        try:
                            worker.pipe.send(((area.begin, len(area.memory)), len(wanted.numbers), task.begin, piece))
                        except OSError:
                            break  # the worker is dead; `_hear` will read that from its pipe

    def _hear(self, worker: _Worker) -> None:
        try:
            filled = worker.pipe.recv()
        except (EOFError, OSError):
            if is_exiting():  # multiprocessing stops all workers when the program exits
                self._closed = True
            else:
                self._replace(worker)
            return
        except Exception as error:  # noqa: BLE001 -- unpickling a class of the user can raise any exception
            filled = f"data worker: its answer cannot be unpickled here: {type(error).__name__}: {error}"
        if isinstance(filled, DataError):  # the worker could not start
            raise filled
        self._idle_deaths = 0
        with self._lock:
            task = worker.tasks.popleft()
            self._lock.notify_all()
        if isinstance(filled, Filled):
            task.job.finish(task.begin, filled)
        else:
            task.job.fail(DataError(filled))

    def _replace(self, worker: _Worker) -> None:
        pid = worker.process.pid
        code = _end(worker.process)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lost = list(worker.tasks)
        worker.pipe.close()
        numbers = [each for task in lost for each in task.job.wanted.numbers[task.begin : task.end].tolist()]
        shown = f"{numbers[:8]}{' ...' if len(numbers) > 8 else ''}"
        name = f"data worker {worker.number} (process {pid})"
        self._idle_deaths += not lost
        if self._idle_deaths >= _DEATHS:
            raise DataError(
                f"{_DEATHS} data workers {how} before they had a sample to read; their own output says why. Processes "
                'need the script\'s main part under `if __name__ == "__main__":`; or use threads, such as workers=2'
            )
        self._report(f"{name} {how}; another worker replaces it and reads its {len(numbers)} samples {shown}")
        if lost:
            lost[0].deaths += 1  # the piece that the worker was making
            if lost[0].deaths >= _DEATHS:
                task = lost.pop(0)
                first = task.job.wanted.numbers[task.begin : task.end].tolist()
                task.job.fail(DataError(f"{_DEATHS} data workers died at samples {first}; the last worker {how}"))
        with self._lock:
            self._waiting.extendleft(task for task in reversed(lost) if not task.job.cancelled)
            worker.tasks.clear()
            self._workers[self._workers.index(worker)] = self._begun(worker.number)


def _end(process: Any) -> int:
    """Wait for a process whose pipe is closed, kill it if it does not exit, and return its exit code."""
    process.join(_JOIN_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    code: int = process.exitcode
    process.close()
    return code


class _Descriptor:
    """A file descriptor that is passed to a process that multiprocessing starts."""

    def __init__(self, number: int, how: Any) -> None:
        self._number, self._how = number, how

    def __getstate__(self) -> Any:
        return self._how(self._number)

    def __setstate__(self, state: Any) -> None:
        self._number = state.detach()

    def number(self) -> int:
        """Return the descriptor's number in this process."""
        return self._number


def _work(
    pipe: Connection, told: bytes, descriptor: _Descriptor, trainer: int, inherited: Sequence[Connection]
) -> None:
    """Fill rows until the other end of the pipe is closed, or until the parent process exits."""
    for each in inherited:
        each.close()
    threading.Thread(target=_end_with, args=(trainer,), daemon=True, name="multiring-data-end").start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the training handles Ctrl-C
    try:
        start: WorkerArguments = pickle.loads(told)  # noqa: S301 -- the parent process made this pickle
    except Exception as error:  # noqa: BLE001 -- unpickling the user's classes can raise any exception
        found = f"a data worker cannot load the data set: {type(error).__name__}: {error}"
        _send(pipe, DataError(f"{found}. With processes=True, define the transform at the top level of a module"))
        return
    areas: dict[tuple[int, int], mmap.mmap] = {}
    while True:
        try:
            area, rows, begin, wanted = pipe.recv()
        except (EOFError, OSError):
            sys.exit(0)
        try:
            if area not in areas:
                areas[area] = mmap.mmap(descriptor.number(), area[1], offset=area[0])
            views = start.layout.views(areas[area], 0, rows)
            answer: Any = fill(start.samples, start.layout, views, begin, wanted)
        except Exception as error:  # noqa: BLE001 -- sent to the thread that waits for the batch
            answer = f"data worker: {type(error).__name__}: {error}"
        _send(pipe, answer)


def _send(pipe: Connection, answer: Any) -> None:
    try:
        told = pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 -- pickling a class of the user can raise any exception
        told = pickle.dumps(f"data worker: a sample cannot be pickled: {type(error).__name__}: {error}")
    try:
        pipe.send_bytes(told)
    except OSError:
        sys.exit(0)


def _end_with(trainer: int) -> None:
    """Exit when the process `trainer` has exited, even in the middle of a piece.

    A closed pipe would also show the exit, unless another process has inherited the trainer's end of the pipe.
    """
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(trainer), select.POLLIN)
        ended.poll()
    except ProcessLookupError:
        pass
    except (OSError, AttributeError):  # the kernel or the C library has no pidfd_open
        while Path(f"/proc/{trainer}").exists():
            time.sleep(_LOOK_S)
    os._exit(1)
