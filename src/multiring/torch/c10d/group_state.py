"""What every operation of a process group needs: its Group, how long to wait, and whether the group still stands."""

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

from multiring.errors import MultiringError
from multiring.runtime import Group, Handle
from multiring.runtime.failures.monitored_barrier import MonitoredBarrier
from multiring.torch.c10d.aborts import Aborts
from multiring.torch.c10d.errors import torch_error
from multiring.torch.c10d.work import Done, OperationWork, SeveralHandles

# Numbers that a program may reduce between a forward, which lends a Work, and its backward.
_LENT = 64


class Closing(Protocol):
    """A part of a group that ends with it."""

    def close(self) -> None:
        """Let what waits for it fail."""


Part = TypeVar("Part", bound=Closing)


class CallOptions(NamedTuple):
    """How one call is to run."""

    waits: bool  # the caller waits for it at once
    timeout_s: float


class Ready(NamedTuple):
    """An operation that only has to be started."""

    start: Callable[[bool], Handle]  # given whether the calling thread waits for the handle next
    settle: Callable[[], None] | None = None  # puts the result where it belongs, once the operation has ended


class GroupState:
    """The part of a process group that its operations build on."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        """Stand on `group`, whose ranks are numbered as torch numbers them.

        Args:
            group: used by nobody else.
            timeout_s: for operations that are given none.
        """
        self.group = group
        self.calls = group.calls
        self.default_timeout_s = timeout_s
        self._end: str | None = None  # what became of the group, in words
        self._aborted_by: int | None = None  # the rank of the world
        self._in_flight: weakref.WeakSet[OperationWork] = weakref.WeakSet()
        # C++ that is given a Work by Python does not keep it alive, and would wait for ever for what is left of it: as
        # DistributedDataParallel's join does, for one number.
        self._lent: deque[OperationWork] = deque(maxlen=_LENT)
        self._owed: deque[OperationWork] = deque()  # whose results are to be put somewhere once they have ended
        self._batch: list[OperationWork] | None = None  # of what is being coalesced
        self._completer: _Completer | None = None
        self._completer_lock = threading.Lock()
        self._parts: dict[type, Any] = {}  # what few groups need, by its class
        self._parts_lock = threading.Lock()
        self._aborts = Aborts(group, self._hear_abort)

    def part(self, kind: Callable[[Group], Part]) -> Part:
        """Return the group's one object of a class, made of its Group when it is first asked for."""
        with self._parts_lock:
            found = self._parts.get(kind)  # type: ignore[call-overload]  # a class is called
            if found is None:
                found = self._parts[kind] = kind(self.group)  # type: ignore[index]  # as above
            return found  # type: ignore[no-any-return]  # what the class makes

    @property
    def is_over(self) -> bool:
        """Whether the group was destroyed or aborted."""
        return self._end is not None

    def options_of(self, opts: Any, timeout: timedelta | None = None) -> CallOptions:
        """Return the options that torch's own of a call, or None, give; an explicit `timeout` wins."""
        if opts is None:
            return CallOptions(waits=False, timeout_s=self._seconds(timeout))
        # Before 2.8 torch did not tell whether the caller waits.
        return CallOptions(waits=not getattr(opts, "asyncOp", True), timeout_s=self._seconds(timeout or opts.timeout))

    def _seconds(self, timeout: timedelta | None) -> float:
        # torch says "none" by a negative one.
        given = 0.0 if timeout is None else timeout.total_seconds()
        return given if given > 0 else self.default_timeout_s

    def issue(
        self,
        what: str,
        ready: Ready,
        options: CallOptions,
        outputs: Sequence[Tensor],
        kind: type[OperationWork] = OperationWork,
    ) -> Any:
        """Start an operation and return its Work; done already where the caller waits.

        Args:
            what: the operation, for errors.
            ready: the operation.
            options: of the call.
            outputs: the tensors that have the result.
            kind: of the Work.

        Returns:
            The Work; None for a caller that would wait, among what is being coalesced.

        Raises:
            DistBackendError: the group does not stand any more; or, for a caller that waits, the operation failed.
            RefusedError: wrong arguments.
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
        if self._aborted_by is not None:  # since it was asked whether the group stands
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

    def issue_several(self, what: str, ready: Sequence[Ready], opts: Any, outputs: Sequence[Tensor]) -> Any:
        """As `issue`, of several operations as one."""
        settles = [each.settle for each in ready if each.settle is not None]

        def start(_waits: bool) -> Handle:  # noqa: FBT001 -- as `issue` calls it
            return SeveralHandles([each.start(False) for each in ready])

        def settle() -> None:
            for each in settles:
                each()

        return self.issue(what, Ready(start, settle if settles else None), self.options_of(opts), outputs)

    def require_state(self, what: str) -> None:
        """Raise DistBackendError where the group was destroyed or aborted."""
        if self._end is not None:
            raise dist.DistBackendError(f"{what}: the process group {self._end}; make it anew")

    # ---- what is coalesced ----

    def _start_coalescing(self, _device: object) -> None:
        """Let the calls that follow be one Work, that of `_end_coalescing`."""
        self._batch = []

    def _end_coalescing(self, _device: object) -> Any:
        """Return the Work of all calls since `_start_coalescing`."""
        batch, self._batch = self._batch or [], None
        return Coalesced(batch) if batch else Done(())

    # ---- completion and end ----

    def settle_owed(self) -> None:
        """Put the results of what has ended, and nobody has waited for, where they belong."""
        for _ in range(len(self._owed)):
            try:
                work = self._owed.popleft()
            except IndexError:  # another thread was here
                return
            if not work.is_completed():
                self._owed.append(work)

    def complete(self, work: OperationWork, future: "Future[Any]") -> None:
        """Set `future`, to None, once `work` has ended; by another thread."""
        if not work.in_order:
            threading.Thread(target=_complete_one, args=(work, future), name="multiring future", daemon=True).start()
            return
        with self._completer_lock:
            if self._completer is None:
                self._completer = _Completer()
            self._completer.watch(work, future)

    def _fall(self, how: str) -> None:
        """Let no operation begin any more; `how` says why, in words. Those in flight go on."""
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
        """Let all operations fail, as `rank` of the world aborts the group; on the control thread."""
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
            except RuntimeError:  # another thread began one meanwhile
                continue


class Coalesced(Done):
    """The Work of what was coalesced."""

    def __init__(self, works: Sequence[OperationWork]) -> None:
        super().__init__([output for work in works for output in work.outputs])
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As of each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all results are there."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """Return a future of all results."""
        futures = [work.get_future() for work in self._works]
        return collect_all(futures).then(lambda _: self.result())


class _Completer:
    """Threads that set futures as operations end, and so run their callbacks.

    Every rank starts a group's operations in the same order: waiting for the first of them never keeps a later one from
    ending. A callback may: it may wait for another collective, whose own future a callback waits for, and so on, as
    torch's powerSGD_hook does. So one thread at least is always out of callbacks; whoever goes into one as the last
    starts another.
    """

    _SPARE = 2  # threads that stay, out of callbacks

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[OperationWork, Future[Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads out of callbacks
        self._start_thread()

    def watch(self, work: OperationWork, future: "Future[Any]") -> None:
        self._queue.put((work, future))

    def stop(self) -> None:
        self._queue.put(None)

    def _start_thread(self) -> None:
        self._free += 1
        threading.Thread(target=self._run, name="multiring futures", daemon=True).start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            with suppress(Exception):  # the future raises it
                work.wait()
            with self._lock:
                self._free -= 1
                if not self._free:
                    self._start_thread()
            future.set_result(None)
            del item, work, future  # or they would live until the next ones come
            with self._lock:
                if self._free >= self._SPARE:
                    return
                self._free += 1
        self._queue.put(None)  # for the others


def _complete_one(work: OperationWork, future: "Future[Any]") -> None:
    with suppress(Exception):  # the future raises it
        work.wait()
    future.set_result(None)
