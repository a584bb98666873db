"""Copies between device memory and pinned host memory, in the order of the device's streams.

A collective of a device tensor runs on the host: the tensor is copied to pinned memory, the Group combines it there,
and the result is copied back. Both copies run on side streams, beside the program's kernels:

    caller's stream   ... kernels that write x | ............ | result to device | kernels that read x
    side stream       ....................... x to host       |
    host              .................................. collective

An event orders the copy to the host behind the kernels before it. The copy back is on the caller's stream, which has to
be behind it anyway. No function here waits for the device on the caller's thread.

The pinned memory is that of `_runtime/engines/pinned_memory.py`.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multiring._runtime import Group
from multiring._runtime.engines.pinned_memory import PinnedBlock, PinnedMemory, block_at
from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.torch.interop import Shared, array_of, described, refuse_other_devices

if TYPE_CHECKING:
    import numpy as np

SERVED = "cuda"
"""The type of the devices that are served."""

_PORTABLE = 1  # cudaHostRegisterPortable: the memory is pinned for all devices of the process


class _PinningByTorch:
    """Pins memory by torch's CUDA runtime; see HostPinning."""

    def pin(self, address: int, size_bytes: int) -> str:
        code = int(_cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
        if code:
            _clear_last_error()
        return f"cudaHostRegister: error {code}" if code else ""

    def unpin(self, address: int) -> None:
        if int(_cudart().cudaHostUnregister(address)):
            _clear_last_error()  # the program could do nothing about it: the memory is released next


def _cudart() -> Any:
    return torch.cuda.cudart()


def _clear_last_error() -> None:
    """Clear the CUDA error that a failed call has left on this thread.

    CUDA keeps the error for the thread. Otherwise torch's next kernel would report it as its own. torch's calls clear
    the errors that they raise; those of `torch.cuda.cudart()` return a code and do not.
    """
    get_last_error = _get_last_error()
    if get_last_error is not None:
        get_last_error()
        return
    with suppress(RuntimeError):  # a kernel reports the error as its own, and clears it
        torch.zeros(1, device=SERVED)


@cache
def _get_last_error() -> Any:
    """Return cudaGetLastError of the runtime with which torch is linked; None if torch has a copy that hides it."""
    try:
        return ctypes.CDLL(torch._C.__file__).cudaGetLastError  # noqa: SLF001 -- torch names its libraries nowhere else
    except (AttributeError, OSError):
        return None


def _array_of(tensor: Tensor) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the memory of `tensor` as an array of its type, or of bytes if NumPy lacks the type, as float8."""
    try:
        return array_of(tensor)
    except TypeError:
        return array_of(tensor.view(torch.uint8))


def is_pinned_here(tensor: Tensor) -> bool:
    """Return whether `tensor` lies in memory of `DeviceStaging.pinned`, so that it can be copied to a device."""
    return not tensor.numel() or block_at(tensor.untyped_storage().data_ptr()) is not None


def _block_of(tensor: Tensor) -> PinnedBlock:
    """Return the block in which `tensor` lies.

    Raises:
        ArgumentError: the tensor is not in memory that `DeviceStaging.pinned` returned.
    """
    block = block_at(tensor.untyped_storage().data_ptr())
    if block is None:
        raise ArgumentError(
            f"a host tensor of {described(tensor)}: want memory of DeviceStaging.pinned, which CUDA copies without "
            "stopping the host"
        )
    return block


class _Known:
    """The stagings of this process's devices, and the pinned memory of its groups."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.stagings: dict[torch.device, DeviceStaging] = {}
        self.memory: weakref.WeakKeyDictionary[Group, PinnedMemory] = weakref.WeakKeyDictionary()

    def memory_of(self, group: Group) -> PinnedMemory:
        with self.lock:
            found = self.memory.get(group)
            if found is None:
                found = self.memory[group] = PinnedMemory(group.calls.services.world_rank, _PinningByTorch())
            return found


class DeviceStaging:
    """Copies between one device of this process and pinned host memory. `staging_of` returns the one of a device.

    All methods may be called from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self._index = device.index
        self._marks: list[Any] = []  # events that can be recorded anew; creating one takes longer than recording it
        with self.module.device(device):
            self._to_host = self.module.Stream(device)
            self._to_device = self.module.Stream(device)

    def pinned(self, group: Group, count: int, dtype: torch.dtype) -> Shared:
        """Return pinned memory of the arena for `count` elements of `dtype`; the contents are undefined.

        The memory returns to the pool when the last tensor or array that uses it is deleted. It is used again when its
        last copy has ended.

        Raises:
            ArgumentError: the rank's segment is full, or CUDA cannot pin the memory.
        """
        tensor = self.pinned_tensor(group, count, dtype)
        return Shared(_array_of(tensor), tensor)

    def pinned_tensor(self, group: Group, count: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor of `pinned`; its type may be one that NumPy does not have."""
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        # The storage of the tensor keeps the array, and every view of the tensor keeps the storage.
        return torch.frombuffer(_known.memory_of(group).take(group, count * dtype.itemsize), dtype=dtype)

    def to_host(self, source: Tensor, target: Tensor, *, waits: bool = False) -> Any:
        """Start to copy `source`, a tensor of the device, to the pinned tensor `target`, and return the copy's event.

        The copy is ordered behind everything that the caller's current stream of the device has been given so far. The
        program may delete `source` at once. `target` has the values when the event has ended.

        With `waits`, this thread waits for the event next. It keeps `source` until then, unless the memory is the
        current stream's. The copy is then on the current stream itself, which saves two events.

        Raises:
            UnsupportedError: the caller's current stream is capturing a graph.
        """
        if not waits:
            return self.all_to_host([source], [target])
        with self._device():
            event = self._copied(_fill, [source], [target], self._current_stream())
        if target.numel():
            _block_of(target).note(event)
        return event

    def all_to_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Start to copy several tensors; see `to_host`. The event is that of the last copy."""
        return self.all_to_host_behind(self.reached(), sources, targets)

    def all_to_host_behind(self, mark: Any, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Start to copy several tensors behind `mark`, an event of `reached`; see `to_host`.

        Any thread may call this method, once for a mark. It keeps the sources until then.
        """
        blocks = {_block_of(target) for target in targets if target.numel()}
        with self._device():
            current = self.module.current_stream(self._index)
            self._to_host.wait_event(mark)
            self._marks.append(mark)  # recorded anew, it does not affect streams that wait for it
            self.module.set_stream(self._to_host)
            try:
                event = self._copied(_fill, sources, targets, self._to_host)
            finally:
                self.module.set_stream(current)
            for block in blocks:  # at once: the copy goes on, even if `record_use` raises
                block.note(event)
            for source in sources:
                record_use(source, self._to_host)
        return event

    def to_device(self, source: Tensor, target: Tensor, after: Any = None) -> Any:
        """Start to copy the pinned tensor `source` to `target`, a tensor of the device, and return the copy's event.

        Without `after`, the copy is on the caller's current stream of the device. With `after`, an event, the copy is
        on a side stream behind that event, and no stream waits for the copy: each stream that uses `target` must wait
        for the returned event. The program may delete `target` at once.

        Raises:
            UnsupportedError: the caller's current stream is capturing a graph.
        """
        return self.all_to_device([source], [target], after)

    def all_to_device(self, sources: Sequence[Tensor], targets: Sequence[Tensor], after: Any = None) -> Any:
        """Start to copy several tensors; see `to_device`. The event is that of the last copy."""
        blocks = {_block_of(source) for source in sources if source.numel()}
        with self._device():
            current = stream = self._current_stream()
            if after is not None:
                stream = self._to_device
                stream.wait_event(after)
                self.module.set_stream(stream)
            try:
                event = self._copied(_overwrite, sources, targets, stream)
            finally:
                if after is not None:
                    self.module.set_stream(current)
            for block in blocks:  # at once: the copy goes on, even if `record_use` raises
                block.note(event)
            for target in targets:
                record_use(target, stream)
        return event

    def reached(self) -> Any:
        """Return an event behind everything that the caller's current stream of the device has been given so far.

        Raises:
            UnsupportedError: the caller's current stream is capturing a graph.
        """
        with self._device():
            stream = self._current_stream()
            try:
                mark = self._marks.pop()
            except IndexError:
                mark = self.module.Event()
            mark.record(stream)
        return mark

    def require_no_capture(self) -> None:
        """Raise UnsupportedError if the caller's current stream is capturing a graph."""
        with self._device():
            self._current_stream()

    def _current_stream(self) -> Any:
        """Return the device's current stream. The device must be the current one."""
        if self.module.is_current_stream_capturing():
            raise UnsupportedError(
                f"the current stream of {self.device} is capturing a graph: a graph cannot hold an operation of "
                "several ranks; call it before or after torch.cuda.graph"
            )
        return self.module.current_stream(self._index)

    def _device(self) -> AbstractContextManager[Any]:
        """Make the device the current one. In most programs it is, and the check is faster than torch's context."""
        return _SAME if self.module.current_device() == self._index else self.module.device(self._index)

    def _copied(
        self,
        copy: Callable[[Tensor, Tensor], None],
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        stream: Any,
    ) -> Any:
        """Start copies on `stream`, the current one, and return the event behind them.

        If an error leaves copies without an event, wait for them. Otherwise the memory that the caller releases now
        would be used again under them.
        """
        try:
            for source, target in zip(sources, targets, strict=True):
                copy(target, source)
            return self._recorded(stream)
        except BaseException:
            with suppress(RuntimeError):  # an error that stays: the device does nothing any more
                stream.synchronize()
            raise

    def _recorded(self, stream: Any) -> Any:
        # A thread that waits for a blocking event sleeps; for others it would spin and take a core from the collective.
        event = self.module.Event(blocking=True)
        event.record(stream)
        return event


_known = _Known()
_SAME = nullcontext()


def _fill(target: Tensor, source: Tensor) -> None:
    """Start to copy to pinned memory."""
    target.copy_(source, non_blocking=True)


def _overwrite(target: Tensor, source: Tensor) -> None:
    """Start to copy to `target`, which may be an inference tensor."""
    is_inference = target.is_inference()
    if is_inference == torch.is_inference_mode_enabled():
        target.copy_(source, non_blocking=True)
        return
    with torch.inference_mode(is_inference):
        target.copy_(source, non_blocking=True)


def staging_of(device: torch.device) -> DeviceStaging:
    """Return the staging of a device of this process; a device without an index is the current one.

    Raises:
        StateError: this process is a fork of a process that has used the device.
        UnsupportedError: multiring does not serve devices of this type.
    """
    found = _known.stagings.get(device)
    if found is not None and _known.pid == os.getpid():
        return found
    refuse_other_devices(device, "the device")
    if _known.stagings and _known.pid != os.getpid():
        raise StateError(
            f"process {os.getpid()} was forked from process {_known.pid}, which uses {device}: CUDA does not work "
            'after a fork; start processes with torch.multiprocessing.get_context("spawn")'
        )
    if device.index is None:
        index = torch.get_device_module(device).current_device()  # type: ignore[unreachable] # may be None in truth
        device = torch.device(device.type, index)
    with _known.lock:
        if device not in _known.stagings:
            _known.pid = os.getpid()
            _known.stagings[device] = DeviceStaging(device)
        return _known.stagings[device]


def record_use(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of a deleted `tensor` until `stream` has done what it has been given so far.

    torch takes `record_stream` for a change of the tensor. For a lazy conjugation or negation, it would call it on a
    copy, and write the copy back: values that another stream writes meanwhile would be lost.
    """
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)  # noqa: SLF001 -- torch has no other way to a view of the same memory
    tensor.record_stream(stream)


def exhausted(
    error: BaseException, rank: int, size_bytes: int, device: torch.device, what: str
) -> torch.OutOfMemoryError:
    """Return an error that names rank, bytes and remedy if the device has no memory left for `what`."""
    return torch.OutOfMemoryError(
        f"rank {rank}: {device} has no memory for {size_bytes} bytes of {what}: free tensors or use a smaller "
        f"batch; the group is still usable. {error}"
    )
