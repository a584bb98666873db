"""The nccl engine: a group's collectives on CUDA devices, by NCCL.

The ranks agree on each operation over the host's network, as on every engine. Then one thread of each process gives the
operations to the device, in an order that is the same on all devices (nccl_order.py). Failures travel as control
messages: a rank that dies, does not answer, or has an error of CUDA or NCCL makes the others abort their communicators,
because NCCL itself would wait forever.

NCCL chooses the order of summation; it does not follow the plan's schedule. Several ranks: verified without GPUs only
(docs/decisions/0115-nccl-engine.md).
"""

import threading
import weakref
from contextlib import suppress
from ctypes import c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.contract import RevokedError, RunningOperation
from multiring._runtime.engines.cuda_arrays import CudaArray, device_buffer
from multiring._runtime.engines.cuda_driver import DRIVER
from multiring._runtime.engines.nccl_communicator import NcclCommunicator, check_reduction, new_name
from multiring._runtime.engines.nccl_device import NcclDevice, NcclOperation, OpenOperations
from multiring._runtime.engines.nccl_failures import NcclFailures
from multiring._runtime.engines.nccl_library import UNIQUE_ID_BYTES, shown_version
from multiring._runtime.engines.told import ELSEWHERE, device_number, require_no_problem, told_by_all
from multiring._runtime.group.compile import Request
from multiring._runtime.group.declining import declining
from multiring._runtime.group.starting import start_agreement
from multiring.errors import (
    CollectiveError,
    MismatchError,
    MultiringError,
    PeerLostError,
    StallError,
    UnsupportedError,
)
from multiring.planner import Plan

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group


class NcclEngine(NcclFailures):
    """One rank's end of the engine for one group. See Engine."""

    name = "nccl"

    def __init__(self, host: "Group", device: NcclDevice) -> None:
        """Make this rank's end, which is one of the device's owners already.

        `host` is a group of the same ranks in host memory, for this engine only.
        """
        super().__init__(host, device)
        self._lead_lock = threading.Lock()  # of the decision whether an operation leads
        # An operation that the ranks refused ends the operations after it too, if one rank has started them.
        self._refused: tuple[int, RevokedError] | None = None  # the last number that must fail, and its error
        self._open = OpenOperations()
        self._made: list[NcclCommunicator] = []
        weakref.finalize(self, _release, device, self._made)

    @classmethod
    def open(cls, group: "Group", device: int | str, *, driver: str = DRIVER) -> "NcclEngine":
        """Return this rank's end for `group`, on a device of this process. All ranks of the group must call it.

        Args:
            group: a group in host memory.
            device: the device, as "cuda:N" or as its number N, as this process sees it.
            driver: the CUDA driver's library.

        Raises:
            UnsupportedError, ArgumentError, CudaError: this rank has no driver, NCCL or device. The other ranks raise
                CollectiveError with the same text.
            CollectiveError: the ranks' versions of NCCL differ, or two ranks use one device.
        """
        if group.calls.services.seals and len(group.topology.hosts) > 1:
            raise UnsupportedError(
                "MULTIRING_SEAL=1: NCCL does not encrypt what it sends between hosts; want a group on one host, or "
                "MULTIRING_DEVICE_PATH=staged or auto"
            )
        host = group.twin()
        try:
            engine = cls(host, NcclDevice.of(device_number(device), driver, group.ranks[group.rank]))
        except MultiringError as error:
            told_by_all(host, {"problem": str(error)})
            raise
        told = told_by_all(host, {"problem": None, "nccl": engine._device.library.version})
        require_no_problem(host, told)
        versions = {each["nccl"]: rank for rank, each in reversed(list(enumerate(told)))}
        if len(versions) > 1:
            shown = ", ".join(f"{shown_version(each)} on rank {rank}" for each, rank in sorted(versions.items()))
            raise CollectiveError(f"the ranks have different versions of NCCL: {shown}; install the same one for all")
        engine._connect()
        return engine

    def serve(self, group: int) -> None:
        """Learn the id of the group for timelines."""
        self.group = group

    def on(self, host: "Group") -> "NcclEngine":
        """Return this rank's end for other ranks of the same devices."""
        self._device.add_owner()
        return NcclEngine(host, self._device)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> CudaArray:
        """Return a new, uninitialized array on the device."""
        self._device.driver.enter()
        return CudaArray(self._device.blocks, self._device.callers, shape, dtype)

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        """Return the device memory of an array of this engine, or of one with DLPack or `__cuda_array_interface__`."""
        return device_buffer(self._device.driver, array, self._device.imports, writes=writes)

    def start(self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]) -> NcclOperation:
        """Start an operation on which all ranks have agreed. NCCL, not `plan`, decides how data travel."""
        del plan
        check_reduction(request)
        refusal = self.refusal(number)
        if refusal is not None:
            raise refusal
        order = self._device.order
        operation = self._operation(number, self._communicator or self._connect(), request, buffers)
        if self._lead(operation):
            self.confirm(operation, None)
            return operation
        proposed = order.propose(self._id)
        try:
            agreed = self._agree_on_time(proposed.number)
        except MultiringError:
            order.withdraw(proposed)
            self._device.wake()
            raise
        order.agree(proposed, agreed, operation)
        self._device.wake()
        return operation

    def start_ahead(
        self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]
    ) -> NcclOperation | None:
        """Start an operation at once if its group has the device for itself and a communicator."""
        del plan
        check_reduction(request)
        with self._lead_lock:
            if self._communicator is None or self._is_refusing or self._has_failed():
                return None
            operation = self._operation(number, self._communicator, request, buffers)
            if not self._lead(operation):
                return None
            self._last_ahead = number
        return operation

    def confirm(self, operation: RunningOperation, error: Exception | None) -> None:
        """Have the ranks agree on the time of an operation that leads, for devices that have several groups."""
        order = self._device.order
        if not isinstance(operation, NcclOperation):
            raise TypeError(f"{operation!r} is not an operation of this engine")
        if not isinstance(error, MismatchError):
            self._last_confirmed = operation.number
        try:
            if error is None and self.refusal(operation.number) is None:
                order.see(self._agree_on_time(order.proposal()))
                return
        except PeerLostError as departure:  # of a rank that may have done its part of the operation
            self._depart(departure)
        except MultiringError as failure:
            error = failure
        order.forget()
        if error is not None and not isinstance(error, MismatchError):
            self.report(error)

    def refusal(self, number: int) -> RevokedError | None:
        """Return the error of operation `number` if the ranks refused an earlier one with it; else None."""
        return self._refused[1] if self._refused is not None and number <= self._refused[0] else None

    def refuse(self, number: int, error: Exception) -> bool:
        """Abort the communicator if a rank has started operation `number` already; see Engine."""
        if self.refusal(number) is not None:
            return True
        with self._lead_lock:
            self._is_refusing = True
        try:
            open_operations = sorted(self._open.now(), key=lambda each: each.number)
            for each in open_operations:  # the earlier ones end on all ranks before any rank aborts
                if each.number < number:
                    _wait_quietly(each)
            told = np.array([self._last_ahead, self._has_failed()])
            start_agreement(self._host.calls, told, "max", "", waits=True).wait()
            last = int(told[0])
            if last < number:
                return False
            text = f"engine nccl: the operation had started when the ranks did not agree on an earlier one: {error}"
            self._refused = last, RevokedError(text)
            self._abandon(self._refused[1])
            return True
        finally:
            self._is_refusing = False

    def settle(self) -> None:
        """Wait for the operations that have started; raise the failure of this end, if there is one."""
        for each in self._open.now():
            _wait_quietly(each)
        self._check()

    def _abandon(self, error: CollectiveError) -> None:
        """End the communicator and its operations. The next operation makes a new one."""
        has_ended = threading.Event()
        self._abandons = error  # the device's thread may be waiting in `settle`

        def abandon() -> None:
            try:
                if self._communicator is not None:
                    self._communicator.abort()
                self._communicator, self._suspicion = None, None
                for each in self._open.now():
                    each.end(error)
            finally:
                has_ended.set()

        self._device.call(abandon)
        if not has_ended.wait(self.patience_s):  # a call of NCCL or of the driver does not return on that thread
            stall = StallError(
                f"engine nccl: the device has not ended its operations {self.patience_s:g} s after the ranks did not "
                f"agree on one of them: {error}; end the program"
            )
            self.report(stall)
            raise stall
        self._abandons = None

    def _operation(
        self, number: int, communicator: NcclCommunicator, request: Request, buffers: tuple[Buffer | None, Buffer]
    ) -> NcclOperation:
        put = partial(self._put_on, communicator, request, buffers)
        made = NcclOperation(self, number, request.collective.value, communicator, put, buffers)
        self._open.add(made)
        return made

    def _lead(self, operation: NcclOperation) -> bool:
        """Give the device an operation without a time, if no other group can have operations there."""
        if not self._device.order.lead(operation, lambda: self._device.has_one_owner):
            return False
        self._device.wake()
        return True

    def _agree_on_time(self, proposed: int) -> int:
        """Return the latest of the times that the ranks propose for an operation."""
        # A rank whose end has failed takes part, or the others would wait for it.
        agreed = np.array([proposed, self._has_failed()])
        start_agreement(self._host.calls, agreed, "max", "", waits=True).wait()
        if agreed[1]:
            raise self._failure_soon()
        return int(agreed[0])

    def _connect(self) -> NcclCommunicator:
        """Make the communicator. All ranks call this method together, and raise the same error."""
        library, host = self._device.library, self._host
        self._device.order.wait_for_leaders()  # making a communicator may wait for the device
        with declining(host):
            name = new_name(library) if host.rank == 0 else np.zeros(UNIQUE_ID_BYTES, np.uint8)
        host.broadcast(name)
        made, problem = None, None
        timeout_s = host.calls.services.stall_timeout_s
        try:
            self._device.driver.enter()
            made = NcclCommunicator.make(library, name.tobytes(), (host.rank, host.size), self._check, timeout_s)
        except MultiringError as error:
            problem = str(error)
            if not self._has_failed():  # the other ranks wait in NCCL for this one
                self._tell_failure(CollectiveError(f"{ELSEWHERE}{host.ranks[host.rank]}: {problem}"))
        try:
            require_no_problem(host, told_by_all(host, {"problem": problem}))
        except MultiringError:
            if made is not None:
                made.abort()
            raise
        self._put = 0
        assert made is not None  # noqa: S101
        self._made[:] = [made]
        self._communicator = made
        return made

    def _put_on(
        self,
        communicator: NcclCommunicator,
        request: Request,
        buffers: tuple[Buffer | None, Buffer],
        stream: c_void_p,
    ) -> None:
        """Put an operation on the stream."""
        self._put += 1
        communicator.put(request, buffers, stream)
        # NCCL may put the operation on the stream only after the call. An event recorded before would come too early.
        communicator.settle(self._check, self._host.calls.services.stall_timeout_s)


def _release(device: NcclDevice, made: list[NcclCommunicator]) -> None:
    """Free the communicator of an end that nobody uses any more. Its operations have ended."""
    for each in made:
        device.call(each.abort)
    device.remove_owner()


def _wait_quietly(operation: NcclOperation) -> None:
    """Wait until an operation has ended, well or not."""
    with suppress(Exception):
        operation.wait()
