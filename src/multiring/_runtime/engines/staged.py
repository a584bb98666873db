"""The staged engine: a group's arrays lie on CUDA devices, and its collectives run in pinned host memory.

It serves what NCCL cannot: several ranks on one device, and hosts without NCCL. A thread of each end copies an
operation's arrays to pinned memory, has the host's collective combine them there, and copies the result back. The
results have the bits of the host's collective.

Verified without GPUs only (docs/decisions/0115-nccl-engine.md).
"""

import threading
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.contract import RevokedError, RunningOperation
from multiring._runtime.engines.cuda_arrays import CudaArray, DeviceBlocks, device_buffer
from multiring._runtime.engines.cuda_driver import DRIVER, CudaDriver, CudaError, CudaEvent
from multiring._runtime.engines.nccl_device import have_wait, ready_of
from multiring._runtime.engines.pinned_memory import PinnedMemory, block_at
from multiring._runtime.engines.told import device_number, require_no_problem, told_by_all
from multiring._runtime.group.compile import Request
from multiring._schedule import Collective
from multiring.errors import MultiringError
from multiring.planner import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from multiring._runtime.group.group import Group

_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # pauses between two looks at an event


class StagedDevice:
    """The device of one rank, for all its ends of the engine that come from one `open`."""

    def __init__(self, driver: CudaDriver, rank: int) -> None:
        self.driver = driver
        self.callers = driver.new_stream()  # of copies to and from arrays of the program
        self.imports = driver.new_stream()  # waits for arrays of other libraries
        self.copies = driver.new_stream()  # to and from pinned memory
        self.blocks = DeviceBlocks(driver, rank)
        self.pinned = PinnedMemory(rank, _PinningByDriver(driver))


class _PinningByDriver:
    """Pins memory by the driver; see HostPinning."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def pin(self, address: int, size_bytes: int) -> str:
        try:
            self._driver.pin(address, size_bytes)
        except CudaError as error:
            return str(error)
        return ""

    def unpin(self, address: int) -> None:
        self._driver.enter()  # of the thread that collects garbage
        self._driver.unpin(address)


class _Copied:
    """The event of a copy, as PinnedBlock wants it."""

    def __init__(self, driver: CudaDriver, event: CudaEvent) -> None:
        self._driver, self._event = driver, event

    def query(self) -> bool:
        """Return whether the copy has ended."""
        return self._driver.has_happened(self._event)

    def synchronize(self) -> None:
        """Wait for the copy. A thread that spins in the driver would take a core from the collective."""
        pause_s = _SHORTEST_S
        while not self.query():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)


class StagedOperation:
    """An operation of the engine; see RunningOperation."""

    def __init__(self, driver: CudaDriver, request: Request, buffers: tuple[Buffer | None, Buffer]) -> None:
        self.request = request
        self.buffers = buffers  # kept until the device no longer uses the memory
        self._driver = driver
        self._is_combined = threading.Event()
        self._event: CudaEvent | None = None
        self._error: Exception | None = None

    def end(self, event: CudaEvent | None, error: Exception | None = None) -> None:
        """Let `order` go on. `event` is that of the copy of the result to the device, or None after an error."""
        self._event, self._error = event, error
        self._is_combined.set()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if not self._is_combined.is_set():
            return False
        with self._driver.ignoring_captures():
            return self._event is None or self._driver.has_happened(self._event)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the device has the result."""
        if not self._is_combined.wait(timeout):
            raise TimeoutError(f"{self.request.collective.value} on the engine staged is in flight after {timeout:g} s")
        if self._error is not None:
            raise self._error
        self.await_device()

    def await_device(self) -> None:
        """Wait until the device does not use the operation's memory any more; see RunningOperation."""
        self._is_combined.wait()
        if self._event is not None:
            self._driver.enter()
            with self._driver.ignoring_captures():
                _Copied(self._driver, self._event).synchronize()

    def order(self, stream: int) -> None:
        """Make `stream` wait for the result. The host waits for the network, and not for the copy back."""
        self._is_combined.wait()
        if self._error is not None:
            raise self._error
        assert self._event is not None  # noqa: S101
        have_wait(self._driver, stream, self._event, self.buffers)


class StagedEngine:
    """One rank's end of the engine for one group. See Engine."""

    name = "staged"

    def __init__(self, host: "Group", device: StagedDevice) -> None:
        """Make this rank's end. `host` is a group of the same ranks in host memory, for this end only."""
        self._device = device
        self._posted: SimpleQueue[StagedOperation | None] = SimpleQueue()
        work = _Staging(host, device)
        threading.Thread(target=_run_all, args=(self._posted, work), name="multiring staged", daemon=True).start()
        weakref.finalize(self, self._posted.put, None)

    @classmethod
    def open(cls, group: "Group", device: int | str, *, driver: str = DRIVER) -> "StagedEngine":
        """Return this rank's end for `group`, on a device of this process. All ranks of the group must call it.

        Ranks may share a device. The arguments are those of NcclEngine.open.

        Raises:
            UnsupportedError, ArgumentError, CudaError: this rank has no driver or no such device. The other ranks raise
                CollectiveError with the same text.
        """
        host, made = group.twin(), None
        try:
            made = StagedDevice(CudaDriver(device_number(device), driver), group.ranks[group.rank])
        except MultiringError as error:
            told_by_all(host, {"problem": str(error)})
            raise
        require_no_problem(host, told_by_all(host, {"problem": None}))
        return cls(host, made)

    def serve(self, group: int) -> None:
        """Do nothing: timelines show the host's collectives."""

    def on(self, host: "Group") -> "StagedEngine":
        """Return this rank's end for other ranks of the same devices."""
        return StagedEngine(host, self._device)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> CudaArray:
        """Return a new, uninitialized array on the device."""
        self._device.driver.enter()
        return CudaArray(self._device.blocks, self._device.callers, shape, dtype)

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        """Return the device memory of an array of this engine, or of one with DLPack or `__cuda_array_interface__`."""
        return device_buffer(self._device.driver, array, self._device.imports, writes=writes)

    def start(
        self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]
    ) -> StagedOperation:
        """Start an operation on which all ranks have agreed. The host's collective has a plan of its own."""
        del number, plan
        operation = StagedOperation(self._device.driver, request, buffers)
        self._posted.put(operation)
        return operation

    def start_ahead(
        self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]
    ) -> StagedOperation | None:
        """Return None: the host's collective cannot be taken back."""
        del number, plan, request, buffers
        return None

    def confirm(self, operation: RunningOperation, error: Exception | None) -> None:
        """Do nothing: no operation starts ahead."""

    def refusal(self, number: int) -> RevokedError | None:
        """Return None: no operation starts ahead."""

    def refuse(self, number: int, error: Exception) -> bool:
        """Return False: no operation starts ahead."""
        del number, error
        return False


class _Staging:
    """What the thread of an end does with an operation. It holds no reference to the end."""

    def __init__(self, host: "Group", device: StagedDevice) -> None:
        self._host, self._device, self._driver = host, device, device.driver
        self._kept: deque[tuple[StagedOperation, _Copied]] = deque()

    @property
    def is_keeping(self) -> bool:
        """Whether results are still on their way to the device."""
        return bool(self._kept)

    def let_go(self) -> None:
        """Drop the operations whose results the device has.

        The caller may have dropped every other reference to their memory. Without this one, another array would get it
        under the copy.
        """
        while self._kept:
            _, copied = self._kept[0]
            try:
                if not copied.query():
                    return
            except CudaError:  # the device has an error that stays; this thread must live to report it
                self._kept.clear()
                return
            self._kept.popleft()

    def enter(self) -> None:
        """Prepare this thread."""
        self._driver.enter()
        self._driver.ignore_captures()

    def run(self, operation: StagedOperation) -> None:
        """Combine the operation's arrays, and start to copy the result back."""
        request, calls = operation.request, self._host.calls
        try:
            source, target = [self._pinned(each) for each in operation.buffers]
            returned = self._driver.new_event()  # after the collective, this rank could not tell the others any more
            self._bring(operation, source, target)
        except Exception as error:  # noqa: BLE001 -- `wait` raises it, on the other ranks, too
            operation.end(None, error)
            self._decline(error)
            return
        try:
            assert target is not None  # noqa: S101
            name = request.collective.value
            calls.run(calls.next(name), f"staged {name}", request, (source, target), None, waits=True).wait()
            self._copy("cuMemcpyHtoDAsync_v2", operation.buffers[1], target, returned)
            self._kept.append((operation, _Copied(self._driver, returned)))
            operation.end(returned)
        except Exception as error:  # noqa: BLE001 -- `wait` raises it
            operation.end(None, error)

    def _bring(self, operation: StagedOperation, source: Buffer | None, target: Buffer | None) -> None:
        """Copy to the host what the host's collective reads, and wait for it."""
        request, given = operation.request, operation.buffers[0]
        reads, into = (given, source) if given is not None else (operation.buffers[1], target)
        if into is None or reads is None:
            return
        self._driver.wait_on(self._device.copies, *ready_of(reads), *ready_of(operation.buffers[1]))
        if request.collective is Collective.BROADCAST and request.root != self._host.rank:
            return
        event = self._driver.new_event()
        self._copy("cuMemcpyDtoHAsync_v2", reads, into, event)
        _Copied(self._driver, event).synchronize()

    def _copy(self, name: str, on_device: Buffer, on_host: Buffer, event: CudaEvent) -> None:
        """Start a copy, behind which the device comes to `event`."""
        to_device = name == "cuMemcpyHtoDAsync_v2"
        places = (on_device.address, on_host.address)[:: 1 if to_device else -1]
        if on_device.size_bytes:
            self._driver.call(name, *places, on_device.size_bytes, self._device.copies)
        self._driver.record(self._device.copies, event)
        block = block_at(on_host.address)
        if block is not None:
            block.note(_Copied(self._driver, event))

    def _pinned(self, buffer: Buffer | None) -> Buffer | None:
        """Return pinned memory in the form of `buffer`."""
        if buffer is None:
            return None
        memory: NDArray[Any] = (
            self._device.pinned.take(self._host, buffer.size_bytes) if buffer.size_bytes else np.empty(0, np.uint8)
        )
        return Buffer(int(memory.ctypes.data), buffer.shape, buffer.strides, buffer.dtype, memory)

    def _decline(self, error: Exception) -> None:
        try:
            self._host.calls.decline("", error)
        except MultiringError:  # no other rank can be reached
            return


def _run_all(posted: "SimpleQueue[StagedOperation | None]", work: _Staging) -> None:
    work.enter()
    while True:
        try:
            operation = posted.get(timeout=_LONGEST_S if work.is_keeping else None)
        except Empty:
            work.let_go()
            continue
        if operation is None:
            break
        work.run(operation)
        del operation  # otherwise its memory would live until the next one comes
        work.let_go()
    while work.is_keeping:
        time.sleep(_LONGEST_S)
        work.let_go()
