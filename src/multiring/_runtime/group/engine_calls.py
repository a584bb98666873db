"""Run a group's collectives on an engine.

The collectives run in the order of the calls, each after all ranks agreed on it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.contract import Engine, RunningOperation
from multiring._runtime.group.compile import Programs, Request, digest_of
from multiring._runtime.group.handles import Key, OperationHandle, Waiter
from multiring._runtime.group.posting import Call, Calls, ProcessServices, Work
from multiring._topology import Topology
from multiring.errors import UnsupportedError


class EngineHandle(Waiter):
    """The handle of an engine's operation.

    The handle covers the ranks' agreement on the operation, and then the engine's run.
    """

    def __init__(self, agreement: OperationHandle, start: Callable[[], RunningOperation], result: Any) -> None:
        self._agreement = agreement
        self._start = start
        self._result = result
        self._is_decided = threading.Event()
        self._running: RunningOperation | None = None
        self._error: Exception | None = None

    @property
    def title(self) -> str:
        """A description of the operation for warnings and errors."""
        return self._agreement.title

    @property
    def key(self) -> Key | None:
        """The operation's identity, the same on all ranks; None for a message."""
        return self._agreement.key

    @property
    def titles(self) -> Mapping[int, str]:
        """Each rank's own title of the operation; available after a mismatch."""
        return self._agreement.titles

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the world ranks to wait for, and the seconds without progress."""
        return ((), 0.0) if self._is_decided.is_set() else self._agreement.stalled_on()

    def give_up(self, silent: int) -> None:
        """Fail the operation on all ranks with a StallError about world rank `silent`."""
        self._agreement.give_up(silent)

    def abort(self, culprit: int) -> None:
        """Make the operation fail on all ranks, because rank `culprit` aborted the group."""
        self._agreement.abort(culprit)

    def begin(self) -> None:
        """Wait until all ranks agree, then start the engine.

        An error is raised later, from the handle's `wait`.
        """
        try:
            self._agreement.wait()
            self._running = self._start()
        except Exception as error:  # noqa: BLE001 -- `wait` raises it
            self._error = error
        self._is_decided.set()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._is_decided.is_set() and (self._running is None or self._running.done())

    def wait(self, timeout: float | None = None) -> Any:
        """Return the operation's result once it has ended; see `Handle`."""
        began_s = time.monotonic()
        if not self._is_decided.wait(timeout):
            raise TimeoutError(f"{self.title} is still in flight after {timeout:g} s")
        if self._error is not None:
            raise self._error
        if self._running is not None:
            self._running.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s)))
        return self._result


class EngineCalls(Calls):
    """The operations of a group with an engine.

    The group's barriers and messages still run in the native core.
    """

    def __init__(
        self, services: ProcessServices, ranks: tuple[int, ...], topology: Topology, key: bytes, engine: Engine
    ) -> None:
        self._queue: SimpleQueue[EngineHandle | None] = SimpleQueue()
        super().__init__(replace(services, replan=False), ranks, topology, key)  # engines are not measured
        self.engine: Engine = engine
        self.programs = Programs(topology, self.own, ranks, services.pins, engine.name, is_alone=True)
        threading.Thread(
            target=_start_all, args=(self._queue,), name=f"multiring engine {engine.name}", daemon=True
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
        """Have the engine run `request`, once the ranks agree on it.

        `buffers` is the pair (input, output).
        """
        del waits  # the engine's own thread waits for the agreement
        plan = self.plan_of(request)
        work = Work(plan=plan, plan_digest=digest_of(plan, request), size_bytes=buffers[1].size_bytes)
        start = partial(self.engine.start, plan, request, buffers)
        handle = EngineHandle(self.post(call, title, work, waits=False), start, result)
        self._queue.put(handle)
        return handle

    def __del__(self) -> None:
        self._queue.put(None)


def _start_all(queue: "SimpleQueue[EngineHandle | None]") -> None:
    while (handle := queue.get()) is not None:
        handle.begin()
        del handle  # release the arrays now; otherwise they stay allocated until the next handle comes
