"""The device of this process: its streams, its memory, and the one thread that gives it operations.

Several ranks: verified without GPUs only (docs/decisions/0115-nccl-engine.md).
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from ctypes import c_void_p
from typing import ClassVar, Protocol

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.cuda_arrays import CudaArray, DeviceBlocks
from multiring._runtime.engines.cuda_driver import CudaDriver, CudaError, CudaEvent
from multiring._runtime.engines.device_times import DeviceTimes
from multiring._runtime.engines.nccl_library import NcclLibrary, find_nccl
from multiring._runtime.engines.nccl_order import DeviceOrder
from multiring.errors import CollectiveError, StallError

_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3  # pauses between two looks at the operations in flight
_SHARE = 8  # a pause is this part of the time since something has happened


class OperationOwner(Protocol):
    """What the device's thread needs of the engine's end that has started an operation."""

    driver: CudaDriver
    group: int  # the id of the group, for timelines
    failure: Exception | None
    patience_s: float  # after which an operation that does not end is an error

    def look(self, oldest_s: float) -> None:
        """Detect failures. `oldest_s` is the age of the oldest operation in flight."""

    def fail(self, error: Exception) -> None:
        """Make all operations fail, on all ranks."""


class Carrier(Protocol):
    """The communicator of an operation."""

    def has_aborted(self) -> bool:
        """Return whether it was aborted, and puts nothing on a stream any more."""


class NcclOperation:
    """An operation on a device; see RunningOperation."""

    def __init__(
        self,
        owner: OperationOwner,
        number: int,
        title: str,
        carrier: Carrier,
        put: Callable[[c_void_p], None],
        buffers: tuple[Buffer | None, Buffer],
    ) -> None:
        """Make operation `number` of `owner`. `put` has `carrier` put it on a stream."""
        self.owner, self.number, self.title, self.carrier, self.put = owner, number, title, carrier, put
        self.buffers = buffers  # kept until the device no longer uses the memory
        self.event: CudaEvent | None = None
        self.times: tuple[CudaEvent, CudaEvent] | None = None  # before and after it, if a timeline is recorded
        self.is_given = False  # whether the device may have it, though there is no event behind it
        self.began_s = 0.0
        self._is_put = threading.Event()
        self._has_left = threading.Event()
        self._ended = threading.Event()
        self._error: Exception | None = None

    def note_put(self) -> None:
        """Let `order` go on: the operation is on the stream, or has failed."""
        self._is_put.set()

    def end(self, error: Exception | None) -> None:
        """Let `wait` return, or raise `error`. Only the first call counts. Called by the device's thread."""
        if not self._ended.is_set():
            self._error = error
            if not self.is_given:
                self.leave()
            self._ended.set()
            self._is_put.set()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the operation has ended on this rank."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.title} on the engine nccl is still in flight after {timeout:g} s")
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Let `await_device` return: the device does not use the operation's memory any more."""
        self._has_left.set()

    def await_device(self) -> None:
        """Wait until the device does not use the operation's memory any more; see RunningOperation."""
        if not self._has_left.wait(self.owner.patience_s):
            raise StallError(
                f"{self.title} on the engine nccl: the device still uses the memory {self.owner.patience_s:g} s after "
                "the operation has failed; end the program"
            )

    def order(self, stream: int) -> None:
        """Make `stream` wait for the operation. The host waits only until the operation is on the device."""
        self._is_put.wait()
        if self._ended.is_set() and self._error is not None:
            raise self._error
        event, buffers = self.event, self.buffers
        if event is None:
            raise CollectiveError(f"{self.title} on the engine nccl has failed")
        have_wait(self.owner.driver, stream, event, buffers)


class OpenOperations:
    """The operations of one end that somebody keeps and that have not ended. Any thread may call the methods.

    A WeakSet would do, but it must not be read while another thread adds to it or drops an operation.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run inside, and ask for the operations
        self._known: list[weakref.ref[NcclOperation]] = []

    def add(self, operation: NcclOperation) -> None:
        """Add an operation that has been made."""
        with self._lock:
            self._known = [weakref.ref(each) for each in (*self.now(), operation)]

    def now(self) -> list[NcclOperation]:
        """Return the operations that are open now."""
        with self._lock:
            known = self._known
        found = [each() for each in known]
        return [each for each in found if each is not None and not each.done()]


class NcclDevice:
    """A device of this process. All engines of the process on one device share this object, and so its order."""

    _shared: ClassVar["weakref.WeakValueDictionary[tuple[str, int, int], NcclDevice]"] = weakref.WeakValueDictionary()
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, device: int, driver: str, rank: int) -> "NcclDevice":
        """Return the device with number `device`, with one more owner.

        Args:
            device: the number of the device, as this process sees it.
            driver: the CUDA driver's library.
            rank: this process's rank, for errors.

        Raises:
            UnsupportedError, ArgumentError, CudaError: this process has no driver, NCCL or device.
        """
        key = driver, device, os.getpid()
        with cls._shared_lock:
            found = cls._shared.get(key)
            if found is None or not found.add_owner():
                found = cls._shared[key] = cls(CudaDriver(device, driver), find_nccl(), rank)
                found.add_owner()
            found.blocks.rank = rank
            return found

    def __init__(self, driver: CudaDriver, library: NcclLibrary, rank: int) -> None:
        self.driver, self.library = driver, library
        self.stream = driver.new_stream()  # of all operations
        self.callers = driver.new_stream()  # of copies to and from the host
        self.imports = driver.new_stream()  # waits for arrays of other libraries
        self.blocks = DeviceBlocks(driver, rank)
        self.order = DeviceOrder()
        self.times = DeviceTimes(driver)
        self.in_flight: deque[NcclOperation] = deque()
        self._leaving: list[NcclOperation] = []  # failed ones, whose memory the device may still use
        self._changed = threading.Condition()
        self._is_woken = False
        self._calls: deque[Callable[[], None]] = deque()
        self._owners = 0
        self._was_owned = self._has_ended = False
        threading.Thread(target=self._run, name="multiring nccl", daemon=True).start()

    @property
    def has_one_owner(self) -> bool:
        """Whether a single end of the engine uses the device."""
        return self._owners == 1

    def add_owner(self) -> bool:
        """Keep the thread for one more end of the engine; return False if it has ended."""
        with self._changed:
            self._was_owned = True
            self._owners += not self._has_ended
            return not self._has_ended

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
        self.driver.ignore_captures()
        moved_s = time.monotonic()
        while True:
            if self._guarded_step():
                moved_s = time.monotonic()
                continue
            with self._changed:
                is_busy = self.in_flight or self._leaving
                if self._was_owned and self._owners == 0 and not is_busy and not self._calls:
                    self._has_ended = True
                    return
                quiet_s = (time.monotonic() - moved_s) / _SHARE
                pause_s = max(_SHORTEST_S, min(quiet_s, _LONGEST_S)) if is_busy else None
                if not self._is_woken:
                    self._changed.wait(pause_s)
                self._is_woken = False

    def _guarded_step(self) -> bool:
        try:
            return self._step()
        except Exception as error:  # noqa: BLE001 -- the thread must live, and `wait` raises it
            for each in list(self.in_flight):
                each.owner.fail(error)
            # The device may still work on them: their memory must not be used again before it has ended.
            self._leaving += self.in_flight
            for each in self.in_flight:
                self._note_times(each, has_done=False)
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
        if operation.done():  # it has failed before
            return
        try:
            operation.times = self.times.events()
            event = operation.times[1] if operation.times else self.driver.new_event()
            for buffer in operation.buffers:
                if buffer is not None:
                    self.driver.wait_on(self.stream, *ready_of(buffer))
            if operation.times:
                self.driver.record(self.stream, operation.times[0])
            operation.is_given = True
            operation.put(self.stream)
            operation.event = self.driver.record(self.stream, event)
            operation.note_put()
        except Exception as error:  # noqa: BLE001 -- the operation's `wait` raises it
            owner.fail(error)

    def _look(self) -> bool:
        """End the operations that the device has done; return whether there were any."""
        has_ended = False
        while self.in_flight and self._has_done(self.in_flight[0]):
            operation = self.in_flight.popleft()
            self._note_times(operation, has_done=operation.event is not None)
            if operation.event is None:
                self._leaving.append(operation)
            else:
                operation.leave()
            operation.end(None)
            has_ended = True
        self._leaving = [each for each in self._leaving if not self._has_left(each)]
        if has_ended and self.in_flight:  # its turn has come only now
            self.in_flight[0].began_s = time.monotonic()
        if self.in_flight and not has_ended:
            age_s = time.monotonic() - self.in_flight[0].began_s
            for owner in {id(each.owner): each.owner for each in self.in_flight}.values():
                owner.look(age_s)
        return has_ended

    def _note_times(self, operation: NcclOperation, *, has_done: bool) -> None:
        times, operation.times = operation.times, None
        if times is not None and has_done:
            self.times.done((operation.owner.group, operation.number), times)
        elif times is not None:
            self.times.lost()

    def _has_done(self, operation: NcclOperation) -> bool:
        if operation.event is None:  # it has failed, or will be found to have
            return operation.done()
        return self.driver.has_happened(operation.event)

    def _has_left(self, operation: NcclOperation) -> bool:
        """Return whether the device does not use an operation's memory any more, and say so to the operation."""
        try:
            if operation.event is None and operation.is_given:
                if not operation.carrier.has_aborted():
                    return False
                # The kernel may be on the stream, and ends behind the abort.
                operation.event = self.driver.record(self.stream)
            if operation.event is not None and not self.driver.has_happened(operation.event):
                return False
        except CudaError:  # the device has an error that stays, and does nothing any more
            pass
        operation.leave()
        return True


def ready_of(buffer: Buffer) -> tuple[CudaEvent, ...]:
    """Return the events after which the memory's contents are complete."""
    ready: tuple[CudaEvent, ...] = getattr(buffer.owner, "ready", ())
    return ready


def have_wait(driver: CudaDriver, stream: int, event: CudaEvent, buffers: tuple[Buffer | None, Buffer]) -> None:
    """Make a stream of the caller wait for `event`, and keep the buffers for the stream's later work."""
    driver.enter()
    driver.check_caller(stream)
    driver.wait_on(stream, event)
    for each in buffers:
        if each is not None and isinstance(each.owner, CudaArray):
            each.owner.ready = (event,)
            each.owner.use_on(stream)
