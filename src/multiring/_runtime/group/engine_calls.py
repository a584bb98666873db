"""Run a group's collectives on an engine.

The collectives run in the order of the calls. Each one starts after all ranks agreed on it; or before, if the engine
can take it back: then the agreement runs beside.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.contract import Engine, RevokedError, RunningOperation
from multiring._runtime.group.compile import Programs, Request, digest_of
from multiring._runtime.group.handles import Key, OperationHandle, Waiter
from multiring._runtime.group.posting import Call, Calls, ProcessServices, Work
from multiring._topology import Topology
from multiring.errors import MismatchError, UnsupportedError
from multiring.planner import Plan

MOST_AHEAD = 64  # operations of a group that have started before their agreement
_INTACT, _UNDEFINED = "inputs are intact", "the contents of its arrays are undefined"
_Arguments = tuple[int, Plan, Request, tuple[Buffer | None, Buffer]]  # of Engine.start


class EngineHandle(Waiter):
    """The handle of an operation of a group with an engine.

    The handle covers the ranks' agreement on the operation, and then the engine's run, if it has one.
    """

    def __init__(
        self, agreement: OperationHandle, call: Call, title: str, work: Work, arguments: _Arguments | None
    ) -> None:
        """Make the handle. `arguments` are those of Engine.start; None if the engine does not take part."""
        self.agreement, self.call = agreement, call
        self._own_title = call.titled(title)
        self._result = work.result
        self._arguments = arguments
        # Whether the ranks count their rows, or assume that they have equally many; see varying_rows.py.
        counts = work.program is not None and call.name == "counts"
        self.is_row_step = counts or (arguments is not None and bool(arguments[2].agreed))
        self._is_started = threading.Event()
        self._is_decided = threading.Event()
        self._running: RunningOperation | None = None
        self._error: Exception | None = None

    @property
    def title(self) -> str:
        """A description of the operation for warnings and errors."""
        return self.agreement.title

    @property
    def key(self) -> Key | None:
        """The operation's identity, the same on all ranks; None for a message."""
        return self.agreement.key

    @property
    def titles(self) -> Mapping[int, str]:
        """Each rank's own title of the operation; available after a mismatch."""
        return self.agreement.titles

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the world ranks to wait for, and the seconds without progress."""
        return ((), 0.0) if self._is_decided.is_set() else self.agreement.stalled_on()

    def give_up(self, silent: int) -> None:
        """Fail the operation on all ranks with a StallError about world rank `silent`."""
        self.agreement.verdict = self.verdict
        self.agreement.give_up(silent)

    def abort(self, culprit: int) -> None:
        """Make the operation fail on all ranks, because rank `culprit` aborted the group."""
        self.agreement.abort(culprit)

    # ---- for the group ----

    def begin_ahead(self, engine: Engine) -> bool:
        """Start the engine before the ranks have agreed; return False if that must wait."""
        if self._arguments is None or self.is_row_step:  # a mismatch of rows is no fault: nothing may move before it
            return False
        try:
            self._running = engine.start_ahead(*self._arguments)
        except Exception:  # noqa: BLE001 -- `Engine.start` raises it again, on all ranks
            return False
        if self._running is None:
            return False
        self._arguments = None
        self._is_started.set()
        return True

    def begin(self, engine: Engine, lead: "_Lead") -> bool:
        """Wait until all ranks agree, then start the engine. Return whether another step of the operation follows.

        An error is raised later, from the handle's `wait`.
        """
        follows = self.is_row_step and self._arguments is None
        error: Exception | None = None
        try:
            self.agreement.wait()
        except MismatchError as mismatch:
            follows = self.is_row_step and set(self.titles.values()) == {self._own_title}
            error = self._refused(engine, mismatch)
        except Exception as failure:  # noqa: BLE001 -- `wait` raises it
            follows, error = False, failure
        running = self._running
        if running is None and error is None and self._arguments is not None:
            try:
                self._running = engine.start(*self._arguments)
            except Exception as failure:  # noqa: BLE001 -- `wait` raises it
                error = failure
        self._error, self._arguments = error, None
        if running is not None and error is None:  # all ranks raise it, also where the operation has ended well
            self._error = engine.refusal(self.call.key[1])
        if not follows:  # else the later operations wait for the next step
            lead.leave(is_ahead=running is not None)
        self._is_decided.set()
        self._is_started.set()
        if running is not None:
            engine.confirm(running, error)
        return follows

    def _refused(self, engine: Engine, error: MismatchError) -> Exception:
        after_start = MismatchError(str(error).replace(_INTACT, _UNDEFINED), error.titles)
        try:
            return after_start if engine.refuse(self.call.key[1], after_start) else error
        except Exception as worse:  # noqa: BLE001 -- `wait` raises it
            return worse

    # ---- for the caller ----

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._is_decided.is_set() and (self._error is not None or self._running is None or self._running.done())

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`."""
        self.agreement.refuse_fork()
        began_s = time.monotonic()
        if not self._is_decided.wait(timeout):
            raise TimeoutError(f"{self.title} is still in flight after {timeout:g} s")
        if self._error is not None:
            raise self._error
        if self._running is not None:
            self._running.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s)))
        return self._result

    def is_refused(self) -> bool:
        """Wait for the ranks' agreement; return whether they refused this operation, or an earlier one with it.

        Then the memory of its arrays is not in use any more, and its contents are undefined. All ranks get the same
        result.
        """
        self.agreement.refuse_fork()
        self._is_decided.wait()
        if not isinstance(self._error, MismatchError | RevokedError):
            return False
        if self._running is not None:  # an abort ends what the device does, but not at once
            self._running.await_device()
        return True

    def order(self, stream: int) -> Any:
        """Make a stream of the caller wait for the result, which is returned at once.

        The stream's later work finds the result. The host waits until the device has got the operation, which the
        operation's start usually ensures, but not for the device. If the operation fails afterwards, the stream goes on
        with undefined contents, and `wait` and the group's next operation raise the error.

        Args:
            stream: the handle of a stream of the group's device, such as torch's `stream.cuda_stream`.

        Raises:
            MultiringError: as for `wait`, if the error is known already.
            UnsupportedError: the operation does not run on an engine with streams.
        """
        self.agreement.refuse_fork()
        self._is_started.wait()
        if self._error is not None:
            raise self._error
        if self._running is not None:
            self._running.order(stream)
        return self._result


class _Lead:
    """How many operations of a group the engine's thread has not handled yet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting, self._ahead = 0, 0

    def may_grow(self) -> bool:
        """Return whether all earlier operations have started, and few of them before their agreement."""
        return self._waiting == 0 and self._ahead < MOST_AHEAD

    def enter(self, *, is_ahead: bool) -> None:
        """Count one more operation."""
        if is_ahead:
            self._ahead += 1
        else:
            self._waiting += 1

    def leave(self, *, is_ahead: bool) -> None:
        """Count one operation less."""
        with self.lock:
            if is_ahead:
                self._ahead -= 1
            else:
                self._waiting -= 1


class EngineCalls(Calls):
    """The operations of a group with an engine.

    The group's barriers and messages still run in the native core.
    """

    def __init__(
        self, services: ProcessServices, ranks: tuple[int, ...], topology: Topology, key: bytes, engine: Engine
    ) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._lead = _Lead()
        super().__init__(replace(services, replan=False), ranks, topology, key)  # engines are not measured
        self.engine: Engine = engine
        engine.serve(self.id)
        self.programs = Programs(topology, self.own, ranks, services.pins, engine.name, is_alone=True)
        threading.Thread(
            target=_start_all,
            args=(self._queue, engine, self._lead, services.stall_timeout_s),
            name=f"multiring engine {engine.name}",
            daemon=True,
        ).start()

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        """Return the memory of one of the engine's arrays."""
        return self.engine.buffer_of(array, writes=writes)

    def copied(self, array: Any, out: Any, *, copies: bool = True) -> Buffer:
        """Raise UnsupportedError: the caller must copy an engine's arrays itself.

        Raises:
            UnsupportedError: always.
        """
        del array, out, copies
        raise UnsupportedError(
            f"copies between arrays of the engine {self.engine.name} are not supported: use one array for input and "
            "output"
        )

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new, uninitialized array of the engine."""
        return self.engine.allocate(shape, dtype)

    def run(  # type: ignore[override] # it returns another kind of handle
        self,
        call: Call,
        title: str,
        request: Request,
        buffers: tuple[Buffer | None, Buffer],
        result: Any,
        *,
        waits: bool,
    ) -> EngineHandle:
        """Have the engine run `request`.

        `buffers` is the pair (input, output).
        """
        del waits  # the engine's own thread waits for the agreement
        plan = self.plan_of(request)
        digest = digest_of(plan, request)
        work = Work(plan=plan, plan_digest=digest, size_bytes=buffers[1].size_bytes, result=result)
        return self._enqueue(call, title, work, (call.key[1], plan, request, buffers))

    def post(  # type: ignore[override] # it returns another kind of handle
        self, call: Call, title: str, work: Work, *, waits: bool
    ) -> OperationHandle | EngineHandle:
        """Post work of the native core; see `Calls.post`."""
        if call.key[0] != self.id:  # a message, which has an order of its own
            return super().post(call, title, work, waits=waits)
        return self._enqueue(call, title, work, None)

    def _enqueue(self, call: Call, title: str, work: Work, arguments: _Arguments | None) -> EngineHandle:
        with self._lead.lock:
            handle = EngineHandle(super().post(call, title, work, waits=False), call, title, work, arguments)
            is_ahead = self._lead.may_grow() and handle.begin_ahead(self.engine)
            self._lead.enter(is_ahead=is_ahead)
            self._queue.put(handle)
        return handle

    def again(self, name: str, array: Any = None, op: str = "sum") -> bool:
        """Return False: the engine's thread must see every operation."""
        del name, array, op
        return False

    def __del__(self) -> None:
        self._queue.put(None)


_Queue = queue.SimpleQueue[EngineHandle | None]


def _start_all(handles: _Queue, engine: Engine, lead: _Lead, patience_s: float) -> None:
    later: deque[EngineHandle | None] = deque()
    while (handle := later.popleft() if later else handles.get()) is not None:
        steps = 0
        while handle is not None and handle.begin(engine, lead):
            # The next step comes from another thread. On all ranks it must come before the later operations.
            steps, number, handle = steps + 1, handle.call.number, None
            handle = _next_step(handles, later, number, patience_s)
        for _ in range(steps):
            lead.leave(is_ahead=False)
        del handle  # release the arrays now; otherwise they stay allocated until the next handle comes


def _next_step(
    handles: _Queue, later: "deque[EngineHandle | None]", number: int, patience_s: float
) -> EngineHandle | None:
    """Return the next step of operation `number`; None if nobody takes it. Other operations go to `later`."""
    for handle in later:
        if handle is not None and handle.call.number == number:
            later.remove(handle)
            return handle
    end_s = time.monotonic() + patience_s
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            handle = handles.get(timeout=min(left_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            break
        if handle is not None and handle.call.number == number:
            return handle
        later.append(handle)
        if handle is None:  # the group is gone
            break
    return None
