"""The state that all operations of a process group share: its Group, its timeout, and whether it has ended."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from multiring._runtime import Group, Handle
from multiring._runtime.failures.monitored_barrier import MonitoredBarrier
from multiring.errors import MultiringError, PeerLostError
from multiring.torch.c10d.aborts import Aborts
from multiring.torch.c10d.errors import torch_error
from multiring.torch.c10d.work import Done, FutureWork, OperationWork, Settable, SeveralHandles

# The number of Work objects of single numbers that are kept alive. A program may start so many such operations between
# a forward, which passes a Work to C++ code, and its backward.
_LENT = 64


class Closing(Protocol):
    """A part of a group that is closed when the group ends."""

    def close(self) -> None:
        """Make the waiting calls of this part fail."""


Part = TypeVar("Part", bound=Closing)


class CallOptions(NamedTuple):
    """The options of one call."""

    waits: bool  # the caller waits for the operation at once
    timeout_s: float


class ReadyOperation(NamedTuple):
    """An operation that is ready to start."""

    start: Callable[[bool], Handle]  # its argument says whether the calling thread waits for the handle next
    settle: Callable[[], None] | None = None  # copies the result to the outputs after the operation has ended


class GroupState:
    """The part of a process group that its operations use."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        """Create the state of a process group on `group`.

        Args:
            group: the ranks, numbered as in torch, in a group that only this object uses.
            timeout_s: the timeout in seconds of operations that are called without a timeout.
        """
        self.group = group
        self.calls = group.calls
        self.default_timeout_s = timeout_s
        self._end: str | None = None  # how the group ended, as a text; None while it can be used
        self._aborted_by: int | None = None  # the world rank of the aborting rank
        self._in_flight: weakref.WeakSet[OperationWork] = weakref.WeakSet()
        # torch's C++ code does not keep a Work from Python alive, and would wait forever for a deleted Work.
        # DistributedDataParallel's join, for example, waits for an operation of one number. Keep such Works alive here.
        self._lent: deque[OperationWork] = deque(maxlen=_LENT)
        self._owed: deque[OperationWork] = deque()  # operations whose results must be copied to the outputs afterwards
        self._coalescing = threading.local()  # `batch`: the operations of this thread's running coalescing
        self._completer: _Completer | None = None
        self._completer_lock = threading.Lock()
        self._parts: dict[type, Any] = {}  # parts that only some groups need, by their class
        self._parts_lock = threading.Lock()
        self._aborts = Aborts(group, self._hear_abort)

    def part(self, kind: Callable[[Group], Part]) -> Part:
        """Return the group's object of class `kind`; create it from the Group at the first call."""
        with self._parts_lock:
            found = self._parts.get(kind)  # type: ignore[call-overload]  # a class is called
            if found is None:
                found = self._parts[kind] = kind(self.group)  # type: ignore[index]  # as above
            return found  # type: ignore[no-any-return]  # an object of the class

    @property
    def is_over(self) -> bool:
        """Whether the group was destroyed or aborted."""
        return self._end is not None

    def options_of(self, opts: Any, timeout: timedelta | None = None) -> CallOptions:
        """Return the options of a call from torch's options or None.

        If `timeout` is given, it replaces the timeout of `opts`.
        """
        if opts is None:
            return CallOptions(waits=False, timeout_s=self._seconds(timeout))
        # torch before 2.8 does not say whether the caller waits.
        return CallOptions(waits=not getattr(opts, "asyncOp", True), timeout_s=self._seconds(timeout or opts.timeout))

    def _seconds(self, timeout: timedelta | None) -> float:
        # torch marks a missing timeout by a negative number.
        given = 0.0 if timeout is None else timeout.total_seconds()
        return given if given > 0 else self.default_timeout_s

    def issue(
        self,
        what: str,
        ready: ReadyOperation,
        options: CallOptions,
        outputs: Sequence[Tensor],
        kind: type[OperationWork] = OperationWork,
    ) -> Any:
        """Start an operation and return its Work; if the caller waits, wait for the operation first.

        Args:
            what: the name of the operation, for errors.
            ready: the operation.
            options: the options of the call.
            outputs: the tensors that receive the result.
            kind: the class of the Work.

        Returns:
            The Work. During coalescing, a caller that waits gets None instead.

        Raises:
            DistBackendError: the group has ended; or the caller waits, and the operation failed.
            RefusedError: the arguments are invalid.
        """
        self.require_state(what)
        batch = self._batch
        waits = options.waits and batch is None
        try:
            handle = ready.start(waits)
        except MultiringError as error:
            raise torch_error(what, error) from error
        work = kind(self, what, handle, (outputs, ready.settle), options.timeout_s)
        self._in_flight.add(work)
        if self._aborted_by is not None:  # the group was aborted after `require_state` had checked it
            work.abort(self._aborted_by)
        if ready.settle is not None and not waits:
            self._owed.append(work)
        if batch is not None:
            batch.append(work)
            return None if options.waits else work
        if waits:
            work.wait()
        elif len(outputs) == 1 and outputs[0].numel() == 1:
            self._lent.append(work)
        return work

    def issue_several(self, what: str, ready: Sequence[ReadyOperation], opts: Any, outputs: Sequence[Tensor]) -> Any:
        """Start several operations and return one Work for all of them; see `issue`."""
        settles = [each.settle for each in ready if each.settle is not None]

        def start(_waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
            return SeveralHandles([each.start(False) for each in ready])

        def settle() -> None:
            for each in settles:
                each()

        return self.issue(what, ReadyOperation(start, settle if settles else None), self.options_of(opts), outputs)

    def failed(self, what: str, error: MultiringError) -> Exception:
        """Return torch's error of an operation that has failed with `error`.

        A rank that aborts the group may leave the job at once. Its abort is then told as the cause: its message comes
        first, but another thread receives it.
        """
        if isinstance(error, PeerLostError):
            self._aborts.hear_all()
            if self._aborted_by is not None:
                what = f"{what}: rank {self._aborted_by} aborted the group"
        return torch_error(what, error)

    def require_state(self, what: str) -> None:
        """Raise DistBackendError if the group was destroyed or aborted."""
        if self._end is not None:
            raise dist.DistBackendError(f"{what}: the process group {self._end}; make it anew")

    # ---- coalescing ----

    @property
    def _batch(self) -> list[Any] | None:
        found: list[Any] | None = getattr(self._coalescing, "batch", None)
        return found

    def take_in(self, work: Any) -> Any:
        """Return a Work that another object has made, for the caller; in a coalescing, add it to the batch."""
        if self._batch is not None:
            self._batch.append(work)
        elif len(work.outputs) == 1 and work.outputs[0].numel() == 1:
            self._lent.append(work)
        return work

    def _start_coalescing(self, _device: object) -> None:
        """Collect the following calls into one Work, which `_end_coalescing` returns."""
        self._coalescing.batch = []

    def _end_coalescing(self, _device: object) -> Any:
        """Return the Work of all calls since `_start_coalescing`."""
        batch, self._coalescing.batch = self._batch or [], None
        return Coalesced(batch) if batch else Done(())

    # ---- completion and end ----

    def settle_owed(self) -> None:
        """Copy the results of ended operations to their outputs if no caller has waited for these operations."""
        for _ in range(len(self._owed)):
            try:
                work = self._owed.popleft()
            except IndexError:  # another thread has emptied the queue
                return
            if not work.is_completed():
                self._owed.append(work)

    def complete(self, work: FutureWork, future: Settable) -> None:
        """Make another thread set `future` to None once `work` has ended."""
        if not work.in_order:
            threading.Thread(target=_complete_one, args=(work, future), name="multiring future", daemon=True).start()
            return
        with self._completer_lock:
            if self._completer is None:
                self._completer = _Completer()
            self._completer.watch(work, future)

    def _fall(self, how: str) -> None:
        """Reject new operations; `how` says why. Operations in flight continue."""
        self._end = self._end or how
        self._aborts.close()
        self._lent.clear()
        for part in list(self._parts.values()):
            part.close()
        with self._completer_lock:
            completer, self._completer = self._completer, None
        if completer is not None:
            completer.stop()

    def _hear_abort(self, rank: int) -> None:
        """Abort all operations, because world rank `rank` has aborted the group; runs on the control thread."""
        self._end = self._end or f"was aborted by rank {rank}"
        self._abort_in_flight(rank)
        barrier = self._parts.get(MonitoredBarrier)
        if barrier is not None:
            barrier.close()

    def _abort_in_flight(self, rank: int) -> None:
        self._aborted_by = rank
        for work in self._all_in_flight():
            work.abort(rank)

    def _all_in_flight(self) -> list[OperationWork]:
        while True:
            try:
                return list(self._in_flight)
            except RuntimeError:  # another thread has changed the dictionary during the iteration
                continue


class Coalesced(Done):
    """The Work of several coalesced operations."""

    def __init__(self, works: Sequence[OperationWork]) -> None:
        super().__init__([output for work in works for output in work.outputs])
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each operation, and return True."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all operations have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all operations have succeeded."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """Wait for all operations."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """Return a future of the list of all outputs."""
        futures = [work.get_future() for work in self._works]
        return collect_all(futures).then(lambda _: self.result())


class _Completer:
    """Threads that set futures when operations end, and thereby run the futures' callbacks.

    Every rank starts a group's operations in the same order, so waiting for an earlier operation never blocks a later
    one. A callback can block: it may wait for another collective, whose future has a callback that also waits, and so
    on, as in torch's powerSGD_hook. At least one thread must therefore be outside of callbacks. The last such thread
    starts another thread before it runs a callback.
    """

    _SPARE = 2  # the number of threads outside of callbacks that are kept

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[FutureWork, Settable] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # the number of threads outside of callbacks
        self._start_thread()

    def watch(self, work: FutureWork, future: Settable) -> None:
        self._queue.put((work, future))

    def stop(self) -> None:
        self._queue.put(None)

    def _start_thread(self) -> None:
        self._free += 1
        threading.Thread(target=self._run, name="multiring futures", daemon=True).start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            with suppress(Exception):  # the future raises the error
                work.wait()
            with self._lock:
                self._free -= 1
                if not self._free:
                    self._start_thread()
            future.set_result(None)
            del item, work, future  # otherwise they would live until the next item arrives
            with self._lock:
                if self._free >= self._SPARE:
                    return
                self._free += 1
        self._queue.put(None)  # stop the other threads


def _complete_one(work: FutureWork, future: Settable) -> None:
    with suppress(Exception):  # the future raises the error
        work.wait()
    future.set_result(None)
