"""Workers that are processes: for transforms in Python, which threads of one process run by turns.

They write into memory that they share with this process, a file without a name, and say by pipes what they have done.
One that dies is told of, replaced, and what it had to do is done by others.
"""

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, Filled, Job, Layout, Wanted, fill, pieces_of
from multiring.errors import DataError

# A piece whose workers die so often takes them along itself.
_DEATHS = 3
_JOIN_S = 5.0


@dataclass(slots=True)
class _Task:
    job: Job
    begin: int
    end: int
    deaths: int = 0


@dataclass(slots=True)
class _Worker:
    number: int
    process: Any
    pipe: Connection
    tasks: "deque[_Task]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a worker process is started with."""

    samples: Samples
    layout: Layout
    rows: int  # of a batch, at most
    slots: int  # for batches that are made or used at a time
    spare: int  # of those: as many may be in use
    context: str  # of multiprocessing: "forkserver", "spawn" or "fork"


class ProcessWorkers:
    """Processes, and the memory that they make batches in.

    Args:
        start: what they are started with.
        workers: how many.
        allocate: gives a batch's arrays, into which it is copied; None where it may stay in the shared memory.
        report: is told of workers that died.
    """

    def __init__(self, start: Start, workers: int, allocate: Allocate | None, report: Callable[[str], None]) -> None:
        self._start, self._allocate, self._report = start, allocate, report
        _, self._slot_bytes = start.layout.offsets(start.rows)
        self._slot_bytes = -(-max(self._slot_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = os.memfd_create("multiring-data", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self._slot_bytes * start.slots)
        self._memory = mmap.mmap(self._file, self._slot_bytes * start.slots)
        self._free = deque(range(start.slots))
        self._waiting: deque[_Task] = deque()
        # A batch may be let go of wherever memory is collected, also by a thread that holds it.
        self._lock = threading.Condition(threading.RLock())
        self._closed = False
        self._held = 0  # slots that somebody outside views
        self._context: Any = multiprocessing.get_context(start.context)
        self._wake, self._woken = self._context.Pipe()
        self._workers = [self._begun(number) for number in range(workers)]
        self._thread = threading.Thread(target=self._serve, daemon=True, name="multiring-data")
        self._thread.start()

    def _begun(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        told = pickle.dumps((self._start, self._slot_bytes))
        # multiprocessing hands the descriptor on where the process begins anew; a fork has it.
        file: Any = self._file if self._start.context == "fork" else DupFd
        process: Any = self._context.Process(
            target=_work, args=(theirs, told, _Descriptor(self._file, file)), daemon=True, name=f"data worker {number}"
        )
        process.start()
        theirs.close()
        return _Worker(number, process, ours, deque())

    def start(self, wanted: Wanted) -> Job:
        """Begin to make a batch, once there is memory for it."""
        with self._lock:
            while not self._free:
                self._lock.wait()
            slot = self._free.popleft()
            rows = len(wanted.numbers)
            pieces = pieces_of(self._start.samples, self._start.layout, rows, len(self._workers))
            views = self._start.layout.views(self._memory, slot * self._slot_bytes, rows)
            job = Job(wanted=wanted, arrays=views, slot=slot)
            self._waiting += [_Task(job, begin, end) for begin, end in job.cut(pieces)]
        self._wake.send_bytes(b"\0")
        return job

    def hand_over(self, job: Job) -> dict[str, Any]:
        """Return a finished batch's arrays. Its memory is used again when nothing views it any more."""
        with self._lock:
            # The loader needs the others for batches that are being made.
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
        owner = (ctypes.c_char * self._slot_bytes).from_buffer(self._memory, job.slot * self._slot_bytes)
        views = self._start.layout.views(owner, 0, rows)
        weakref.finalize(owner, self._let_go, job).atexit = False
        job.arrays = {}
        return views

    def _let_go(self, job: Job) -> None:
        with self._lock:
            self._held -= 1
        self._give_back(job)

    def _give_back(self, job: Job) -> None:
        job.arrays = {}
        with self._lock:
            self._free.append(job.slot)
            self._lock.notify()

    def drop(self, job: Job) -> None:
        """Let go of a batch that nobody wants, once workers do not write into it any more."""
        job.cancelled = True
        with self._lock:
            dropped = [each for each in self._waiting if each.job is job]
            self._waiting = deque(each for each in self._waiting if each.job is not job)
        for each in dropped:
            job.finish(each.begin, Filled(lists={}, failures=[]))
        threading.Thread(target=self._drained, args=(job,), daemon=True).start()

    def _drained(self, job: Job) -> None:
        with self._lock:
            while any(task.job is job for each in self._workers for task in each.tasks) and not self._closed:
                self._lock.wait(0.1)
        self._give_back(job)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.send_bytes(b"\0")
        self._thread.join(_JOIN_S)
        for each in self._workers:
            each.pipe.close()
        for each in self._workers:
            each.process.join(_JOIN_S)
            if each.process.exitcode is None:
                each.process.kill()
                each.process.join()
            each.process.close()
        os.close(self._file)
        self._wake.close()
        self._woken.close()

    # ---- the thread that gives out work ----

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._give_out()
                ready = wait([self._woken, *(each.pipe for each in self._workers)])
                if self._woken in ready:
                    self._woken.recv_bytes()
                for worker in list(self._workers):
                    if worker.pipe in ready:
                        self._hear(worker)
        except BaseException as error:  # noqa: BLE001 -- raised where batches are waited for
            for task in [*self._waiting, *(task for each in self._workers for task in each.tasks)]:
                task.job.fail(error)

    def _give_out(self) -> None:
        with self._lock:
            # Two each: the next one is there when one is done.
            for depth in range(2):
                for worker in self._workers:
                    if self._waiting and len(worker.tasks) <= depth:
                        task = self._waiting.popleft()
                        worker.tasks.append(task)
                        wanted = task.job.wanted
                        piece = wanted.piece(task.begin, task.end)
                        try:
                            worker.pipe.send((task.job.slot, len(wanted.numbers), task.begin, piece))
                        except OSError:
                            break  # it is dead, which its pipe tells

    def _hear(self, worker: _Worker) -> None:
        try:
            filled = worker.pipe.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        with self._lock:
            task = worker.tasks.popleft()
            self._lock.notify_all()
        if isinstance(filled, Filled):
            task.job.finish(task.begin, filled)
        else:
            task.job.fail(DataError(filled))

    def _bury(self, worker: _Worker) -> None:
        worker.process.join()
        code = worker.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        lost = list(worker.tasks)
        worker.pipe.close()
        numbers = [each for task in lost for each in task.job.wanted.numbers[task.begin : task.end].tolist()]
        shown = f"{numbers[:8]}{' ...' if len(numbers) > 8 else ''}"
        name = f"data worker {worker.number} (process {worker.process.pid})"
        self._report(f"{name} was {how}; another one takes its place and reads its {len(numbers)} samples {shown}")
        worker.process.close()
        if lost:
            lost[0].deaths += 1  # what it was at
            if lost[0].deaths >= _DEATHS:
                task = lost.pop(0)
                first = task.job.wanted.numbers[task.begin : task.end].tolist()
                task.job.fail(DataError(f"{_DEATHS} data workers died at samples {first}; the last was {how}"))
        with self._lock:
            self._waiting.extendleft(reversed(lost))
            worker.tasks.clear()
            self._workers[self._workers.index(worker)] = self._begun(worker.number)


class _Descriptor:
    """A descriptor on its way to a process that multiprocessing starts."""

    def __init__(self, number: int, how: Any) -> None:
        self._number, self._how = number, how

    def __getstate__(self) -> Any:
        return self._how(self._number)

    def __setstate__(self, state: Any) -> None:
        self._number = state.detach()

    def number(self) -> int:
        """Return it, in this process."""
        return self._number


def _work(pipe: Connection, told: bytes, descriptor: _Descriptor) -> None:
    """Fill rows until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the training's to handle
    start, slot_bytes = pickle.loads(told)  # noqa: S301 -- of the process that started this one
    memory = mmap.mmap(descriptor.number(), slot_bytes * start.slots)
    while True:
        try:
            slot, rows, begin, wanted = pipe.recv()
        except (EOFError, OSError):
            sys.exit(0)
        try:
            views = start.layout.views(memory, slot * slot_bytes, rows)
            answer: Any = fill(start.samples, start.layout, views, begin, wanted)
        except Exception as error:  # noqa: BLE001 -- told to who waits
            answer = f"data worker: {type(error).__name__}: {error}"
        pipe.send(answer)
