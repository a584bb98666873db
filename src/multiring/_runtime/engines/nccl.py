"""The nccl engine: a group's collectives on CUDA devices, by NCCL.

The ranks agree on each operation over the host's network, as on every engine. Then one thread of each process gives the
operations to the device, in an order that is the same on all devices (nccl_order.py). Failures travel as control
messages: a rank that dies, does not answer, or has an error of CUDA or NCCL makes the others abort their communicators,
because NCCL itself would wait forever.

NCCL chooses the order of summation; it does not follow the plan's schedule. Verified without a GPU only
(docs/decisions/0115-nccl-engine.md).
"""

import json
import time
import weakref
from ctypes import c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.cuda_arrays import CudaArray, foreign_buffer, own_buffer
from multiring._runtime.engines.cuda_driver import DRIVER, CudaDriver, CudaError
from multiring._runtime.engines.nccl_communicator import NcclCommunicator, check_reduction, new_name
from multiring._runtime.engines.nccl_device import NcclDevice, NcclOperation
from multiring._runtime.engines.nccl_library import UNIQUE_ID_BYTES, find_nccl, shown_version
from multiring._runtime.group.compile import Request
from multiring.errors import ArgumentError, CollectiveError, MultiringError, PeerLostError, StallError, StateError
from multiring.planner import Plan

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group

_FAILURE, _QUESTION, _ANSWER = range(3)  # tags of control messages
_KINDS = {each.__name__: each for each in (PeerLostError, StallError, CollectiveError)}
_ANSWER_S = 1.0  # how long a rank that is asked may take to answer
_PAUSE_S = 0.001
_MOST_TEXT = 400  # characters of an error that other ranks get
_ROW = 1024  # bytes of a rank's line in `_told_by_all`


class NcclEngine:
    """One rank's end of the engine for one group. See Engine."""

    name = "nccl"

    def __init__(self, host: "Group", device: NcclDevice) -> None:
        """Make this rank's end. `host` is a group of the same ranks in host memory, for this engine only."""
        self.failure: Exception | None = None
        self._host, self._device = host, device
        self._communicator: NcclCommunicator | None = None
        self._put = 0  # operations put on the device
        self._reported: Exception | None = None  # a failure that another thread has heard of
        self._asked_s: float | None = None
        self._answers: dict[int, int] = {}
        calls = host.calls
        self._numbers = calls.ranks
        self._id = calls.purpose_id("engine nccl")
        self._control = calls.services.control if host.size > 1 else None
        device.add_owner()
        self._made: list[NcclCommunicator] = []
        weakref.finalize(self, _release, device, self._made)
        if self._control is not None:
            self._control.add(self._id, _Listener(self))
            weakref.finalize(self, self._control.remove, self._id)

    @classmethod
    def open(cls, group: "Group", device: int, *, driver: str = DRIVER) -> "NcclEngine":
        """Return this rank's end for `group`, on a device of this process. All ranks of the group must call it.

        Args:
            group: a group in host memory.
            device: the number of the device, as this process sees it.
            driver: the CUDA driver's library.

        Raises:
            UnsupportedError, ArgumentError, CudaError: this rank has no driver, NCCL or device. The other ranks raise
                CollectiveError with the same text.
            CollectiveError: the ranks' versions of NCCL differ, or two ranks use one device.
        """
        host = group.twin()
        try:
            made = NcclDevice(CudaDriver(device, driver), find_nccl(), group.ranks[group.rank])
        except MultiringError as error:
            _told_by_all(host, {"problem": str(error)})
            raise
        told = _told_by_all(host, {"problem": None, "nccl": made.library.version})
        _check(host, told)
        versions = {each["nccl"]: rank for rank, each in reversed(list(enumerate(told)))}
        if len(versions) > 1:
            shown = ", ".join(f"{shown_version(each)} on rank {rank}" for each, rank in sorted(versions.items()))
            raise CollectiveError(f"the ranks have different versions of NCCL: {shown}; install the same one for all")
        engine = cls(host, made)
        engine._connect()
        return engine

    def on(self, host: "Group") -> "NcclEngine":
        """Return this rank's end for other ranks of the same devices."""
        return NcclEngine(host, self._device)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> CudaArray:
        """Return a new, uninitialized array on the device."""
        self._device.driver.enter()
        return CudaArray(self._device.blocks, self._device.callers, shape, dtype)

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        """Return the device memory of an array of this engine, or of one with `__cuda_array_interface__`."""
        if isinstance(array, CudaArray):
            return own_buffer(array)
        if not hasattr(array, "__cuda_array_interface__"):
            raise ArgumentError(
                f"{type(array).__qualname__} is not in device memory; want an array of the group's `allocate`, or one "
                "with __cuda_array_interface__"
            )
        return foreign_buffer(self._device.driver, array, writes=writes)

    def start(self, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]) -> NcclOperation:
        """Start an operation on which all ranks have agreed. NCCL, not `plan`, decides how data travel."""
        del plan
        check_reduction(request)
        communicator = self._communicator or self._connect()
        operation = NcclOperation(
            self, request.collective.value, partial(self._put_on, communicator, request, buffers), buffers
        )
        order = self._device.order
        proposed = order.propose(self._id)
        # A rank whose end has failed takes part, or the others would wait for it.
        agreed = np.array([proposed.number, self._has_failed()])
        try:
            self._host.all_reduce(agreed, "max")
        except MultiringError:
            order.withdraw(proposed)
            self._device.wake()
            raise
        if agreed[1]:
            order.withdraw(proposed)
            self._device.wake()
            raise self._failure_soon()
        order.agree(proposed, int(agreed[0]), operation)
        self._device.wake()
        return operation

    def _has_failed(self) -> bool:
        return self.failure is not None or self._reported is not None

    def _failure_soon(self) -> Exception:
        """Return the failure of any rank. Its message may still be on the way."""
        end_s = time.monotonic() + _ANSWER_S
        while not self._has_failed() and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
        return self.failure or self._reported or CollectiveError("engine nccl: an operation has failed on another rank")

    def _check(self) -> None:
        """Raise the failure of this engine's group."""
        if (error := self.failure or self._reported) is not None:
            raise error

    def _connect(self) -> NcclCommunicator:
        """Make the communicator. All ranks call this method together, and raise the same error."""
        library, host = self._device.library, self._host
        name = new_name(library) if host.rank == 0 else np.zeros(UNIQUE_ID_BYTES, np.uint8)
        host.broadcast(name)
        problem = None
        timeout_s = host.calls.services.stall_timeout_s
        self._device.driver.enter()
        try:
            made = NcclCommunicator.make(library, name.tobytes(), (host.rank, host.size), self._check, timeout_s)
        except MultiringError as error:
            problem = str(error)
        _check(host, _told_by_all(host, {"problem": problem}))
        self._communicator = made
        self._made.append(made)
        return made

    # ---- for the device's thread ----

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

    def look(self, oldest_s: float) -> None:
        """Detect a failure of an operation in flight."""
        if self.failure is not None or self._communicator is None:
            return
        error = self._reported or self._communicator.failure()
        if error is None and oldest_s > self._host.calls.services.stall_timeout_s:
            error = self._stall(oldest_s)
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Abort the communicator, fail all operations and tell the other ranks."""
        if self.failure is not None:
            return
        own = self._host.ranks[self._host.rank]
        if not isinstance(error, CollectiveError):
            ending = "; this process cannot use its devices any more and must end" if _stays(error) else ""
            error = CollectiveError(f"rank {own}: {error}{ending}")
        self.failure = error
        if error is not self._reported:
            self._tell_all(_FAILURE, json.dumps([type(error).__name__, str(error)[:_MOST_TEXT]]).encode())
        if self._communicator is not None:
            self._communicator.abort()
        for operation in self._device.in_flight:
            if operation.owner is self:
                operation.end(error)

    def _stall(self, oldest_s: float) -> StallError | None:
        """Ask the other ranks what they have started. Return the error once they had the time to answer."""
        now_s = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
            self._tell_all(_QUESTION, b"")
        if now_s - self._asked_s < _ANSWER_S:
            return None
        ranks = self._host.ranks
        others = [index for index in range(self._host.size) if index != self._host.rank]
        silent = [index for index in others if index not in self._answers]
        behind = [index for index in others if index not in silent and self._answers[index] < self._put]
        what = "does not answer" if silent else "has not started the operation"
        who = silent or behind
        said = f"rank {', '.join(str(ranks[index]) for index in who)} {what}" if who else "all ranks have started it"
        return StallError(f"engine nccl: an operation has not ended for {oldest_s:.0f} s: {said}")

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Handle a message of another rank's end."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        if notice.tag == _QUESTION:
            self._tell(notice.rank, _ANSWER, str(self._put).encode())
        elif notice.tag == _ANSWER:
            self._answers[self._numbers.index(notice.rank)] = int(notice.payload)
        else:
            kind, text = json.loads(notice.payload)
            self.report(_KINDS.get(kind, CollectiveError)(text))

    def lose(self, number: int, *, died: bool, why: str) -> None:
        """Fail because a rank died or left."""
        if number in self._numbers:
            rank = self._host.ranks[self._numbers.index(number)]
            self.report(PeerLostError(f"engine nccl: rank {rank} {'died' if died else 'left'}: {why}"))

    def report(self, error: Exception) -> None:
        """Fail soon, on the device's thread."""
        if self._reported is None:
            self._reported = error
            self._device.call(lambda: self.fail(error))

    def _tell_all(self, tag: int, payload: bytes) -> None:
        for number in self._numbers:
            if number != self._numbers[self._host.rank]:
                self._tell(number, tag, payload)

    def _tell(self, number: int, tag: int, payload: bytes) -> None:
        if self._control is None:
            return
        try:
            self._control.send(number, self._id, tag, payload)
        except StateError:  # the rank takes no more messages; it is lost, or will be reported as silent
            return


class _Listener:
    """Passes control messages to an end of the engine, and does not keep it alive."""

    def __init__(self, engine: NcclEngine) -> None:
        self._engine = weakref.ref(engine)

    def hear(self, notice: ControlMessage) -> None:
        if (engine := self._engine()) is not None:
            engine.hear(notice)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        if (engine := self._engine()) is not None:
            engine.lose(rank, died=died, why=why)

    def end(self) -> None:
        if (engine := self._engine()) is not None:
            engine.report(StateError("engine nccl: this rank has left the job"))


def _release(device: NcclDevice, made: list[NcclCommunicator]) -> None:
    """Free the communicator of an end that nobody uses any more. Its operations have ended."""
    for each in made:
        device.call(each.abort)
    device.remove_owner()


def _stays(error: Exception) -> bool:
    return isinstance(error, CudaError) and error.stays


def _told_by_all(host: "Group", own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank tells."""
    row = np.zeros((1, _ROW), np.uint8)
    text = json.dumps({key: each[:_MOST_TEXT] if isinstance(each, str) else each for key, each in own.items()}).encode()
    row[0, : len(text)] = np.frombuffer(text, np.uint8)
    return [json.loads(bytes(each).rstrip(b"\0")) for each in host.all_gather(row)]


def _check(host: "Group", told: list[dict[str, Any]]) -> None:
    """Raise the first problem of any rank, with its rank."""
    for rank, each in zip(host.ranks, told, strict=True):
        if each["problem"]:
            raise CollectiveError(f"rank {rank}: {each['problem']}")
