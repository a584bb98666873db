"""The device of this process: its streams, its memory, and the one thread that gives it operations.

Verified without a GPU only (docs/decisions/0115-nccl-engine.md).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import c_void_p
from typing import Protocol

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.cuda_arrays import DeviceBlocks
from multiring._runtime.engines.cuda_driver import CudaDriver, CudaEvent
from multiring._runtime.engines.nccl_library import NcclLibrary
from multiring._runtime.engines.nccl_order import DeviceOrder

_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3  # pauses between two looks at the operations in flight
_SHARE = 8  # a pause is this part of the time since something has happened


class OperationOwner(Protocol):
    """What the device's thread needs of the engine's end that has started an operation."""

    failure: Exception | None

    def look(self, oldest_s: float) -> None:
        """Detect failures. `oldest_s` is the age of the oldest operation in flight."""

    def fail(self, error: Exception) -> None:
        """Make all operations fail, on all ranks."""


class NcclOperation:
    """An operation on a device; see RunningOperation."""

    def __init__(
        self, owner: OperationOwner, title: str, put: Callable[[c_void_p], None], buffers: tuple[Buffer | None, Buffer]
    ) -> None:
        """Make an operation of `owner`. `put` puts it on a stream."""
        self.owner, self.title, self.put = owner, title, put
        self.buffers = buffers  # kept until the device no longer uses the memory
        self.event: CudaEvent | None = None
        self.began_s = 0.0
        self._ended = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """Let `wait` return, or raise `error`. Only the first call counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the operation has ended on this rank."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.title} on the engine nccl is still in flight after {timeout:g} s")
        if self._error is not None:
            raise self._error


class NcclDevice:
    """The device of this process."""

    def __init__(self, driver: CudaDriver, library: NcclLibrary, rank: int) -> None:
        self.driver, self.library = driver, library
        self.stream = driver.new_stream()  # of all operations
        self.callers = driver.new_stream()  # of copies to and from the host
        self.blocks = DeviceBlocks(driver, rank)
        self.order = DeviceOrder()
        self.in_flight: deque[NcclOperation] = deque()
        self._changed = threading.Condition()
        self._is_woken = False
        self._calls: deque[Callable[[], None]] = deque()
        self._owners = 0
        threading.Thread(target=self._run, name="multiring nccl", daemon=True).start()

    def add_owner(self) -> None:
        """Keep the thread for one more end of the engine."""
        with self._changed:
            self._owners += 1

    def remove_owner(self) -> None:
        """End the thread if this was the last end of the engine."""
        with self._changed:
            self._owners -= 1
        self.wake()

    def wake(self) -> None:
        """Make the thread look for something to do."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread."""
        self._calls.append(function)
        self.wake()

    def _run(self) -> None:
        self.driver.enter()
        moved_s = time.monotonic()
        while True:
            if self._guarded_step():
                moved_s = time.monotonic()
                continue
            with self._changed:
                if self._owners == 0 and not self.in_flight and self._is_woken:
                    return
                quiet_s = (time.monotonic() - moved_s) / _SHARE
                pause_s = max(_SHORTEST_S, min(quiet_s, _LONGEST_S)) if self.in_flight else None
                if not self._is_woken:
                    self._changed.wait(pause_s)
                self._is_woken = False

    def _guarded_step(self) -> bool:
        try:
            return self._step()
        except Exception as error:  # noqa: BLE001 -- the thread must live, and `wait` raises it
            for each in list(self.in_flight):
                each.owner.fail(error)
            self.in_flight.clear()
            return True

    def _step(self) -> bool:
        """Do what there is to do; return False if that was nothing."""
        has_called = bool(self._calls)
        while self._calls:
            self._calls.popleft()()
        operation = self.order.next()
        if isinstance(operation, NcclOperation):
            self._issue(operation)
            return True
        return self._look() or has_called

    def _issue(self, operation: NcclOperation) -> None:
        owner = operation.owner
        operation.began_s = time.monotonic()
        self.in_flight.append(operation)
        if owner.failure is not None:
            operation.end(owner.failure)
            return
        try:
            for buffer in operation.buffers:
                if buffer is not None:
                    self.driver.wait_on(self.stream, ready_of(buffer))
            operation.put(self.stream)
            operation.event = self.driver.record(self.stream)
        except Exception as error:  # noqa: BLE001 -- the operation's `wait` raises it
            owner.fail(error)

    def _look(self) -> bool:
        """End the operations that the device has done; return whether there were any."""
        has_ended = False
        while self.in_flight and self._has_ended(self.in_flight[0]):
            self.in_flight.popleft().end(None)
            has_ended = True
        if self.in_flight and not has_ended:
            age_s = time.monotonic() - self.in_flight[0].began_s
            for owner in {id(each.owner): each.owner for each in self.in_flight}.values():
                owner.look(age_s)
        return has_ended

    def _has_ended(self, operation: NcclOperation) -> bool:
        return operation.event is None or self.driver.has_happened(operation.event)


def ready_of(buffer: Buffer) -> CudaEvent | None:
    """Return the event after which the memory's contents are complete."""
    ready: CudaEvent | None = getattr(buffer.owner, "ready", None)
    return ready
