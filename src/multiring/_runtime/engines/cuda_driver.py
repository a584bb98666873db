"""The CUDA driver through ctypes: the functions that the nccl engine calls, and their errors.

The driver belongs to the machine, so nothing of CUDA is needed to build or install multiring. See
docs/decisions/0115-nccl-engine.md.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from multiring.errors import ArgumentError, MultiringError, StateError, UnsupportedError

DRIVER = "libcuda.so.1"
# The functions and their parameters. The libraries that tests use in place of NVIDIA's are compiled with this table.
CUDA_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
}
OLDEST = 11000  # the driver of CUDA 11, the first that NCCL 2.18 was built for
_OUT_OF_MEMORY, _NOT_INITIALIZED, _NOT_READY = 2, 3, 600
_NON_BLOCKING, _NO_TIMING = 1, 2
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: the memory is pinned for all devices of the process
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class CudaError(MultiringError, RuntimeError):
    """A call of the CUDA driver failed. `code` is the driver's CUresult.

    After some codes, such as 700 or 710, every later call of this process fails too: the process must end.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code

    @property
    def stays(self) -> bool:
        """Whether the process cannot use its devices any more."""
        return 700 <= self.code < 720 and self.code not in (712, 713)


def device_count(path: str = DRIVER) -> int:
    """Return the number of devices that this process sees; 0 without a driver that works. No memory is taken."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return 0
    found = c_int()
    failed = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(found))
    return 0 if failed else found.value


class CudaDriver:
    """The driver with the primary context of one device.

    A thread must call `enter` before its first other call.
    """

    def __init__(self, device: int, path: str = DRIVER) -> None:
        """Load the driver and retain the device's primary context, which other libraries of the process use too.

        Raises:
            UnsupportedError: there is no driver, or it is too old.
            ArgumentError: there is no such device.
            CudaError: the driver refuses.
        """
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise UnsupportedError(
                f"no CUDA driver: {error}; want the {DRIVER} of an NVIDIA driver on this host"
            ) from None
        version = c_int()
        library.cuDriverGetVersion(ctypes.byref(version))
        if version.value < OLDEST:
            raise UnsupportedError(
                f"the CUDA driver on this host serves CUDA {_shown(version.value)}; want {_shown(OLDEST)} or later: "
                "install a newer NVIDIA driver"
            )
        self._functions = {name: getattr(library, name) for name in CUDA_SIGNATURES}
        for name, parameters in CUDA_SIGNATURES.items():
            self._functions[name].argtypes = parameters
        self._process = os.getpid()
        # by whether the device notes the time at which a stream comes to the event
        self._idle_events: dict[bool, deque[c_void_p]] = {False: deque(), True: deque()}
        self.device = device
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= device < count.value:
            raise ArgumentError(f"device={device}: want 0 to {count.value - 1}, the devices that this process sees")
        self._context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Let this thread use the device.

        Raises:
            StateError: the process was forked after CUDA was initialised.
        """
        if os.getpid() != self._process:
            raise _forked()
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            CudaError: the driver returned an error.
            StateError: the process was forked after CUDA was initialised.
        """
        code = self._functions[name](*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> MultiringError:
        if code == _NOT_INITIALIZED and os.getpid() != self._process:
            return _forked()
        text = c_char_p()
        self._functions["cuGetErrorString"](code, ctypes.byref(text))
        return CudaError(f"device {self.device}: {name}: {(text.value or b'unknown error').decode()} ({code})", code)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the address of new device memory; None if the device has no room for it."""
        address = c_uint64()
        code = self._functions["cuMemAlloc_v2"](ctypes.byref(address), size_bytes)
        if code == _OUT_OF_MEMORY:
            return None
        if code:
            raise self._error("cuMemAlloc_v2", code)
        return address.value

    def free(self, address: int) -> None:
        """Free device memory. The call waits for all work of the device."""
        self.call("cuMemFree_v2", address)

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin host memory, so that copies do not stop the host.

        Raises:
            CudaError: the driver refuses, for example beyond the limit of locked memory.
        """
        self.call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo `pin`. The call waits for all work of the device."""
        self.call("cuMemHostUnregister", address)

    def memory_left(self) -> tuple[int, int]:
        """Return the free bytes and all bytes of the device."""
        left, whole = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(whole))
        return left.value, whole.value

    def device_of(self, address: int) -> int | None:
        """Return the number of the device on which an address lies; None for memory that CUDA does not know."""
        found = c_int(-1)
        code = self._functions["cuPointerGetAttribute"](ctypes.byref(found), _DEVICE_ORDINAL, address)
        return None if code else found.value

    def new_stream(self) -> c_void_p:
        """Return a new stream, which does not wait for the legacy stream."""
        made = c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(made), _NON_BLOCKING, 0)
        return made

    def new_event(self, *, is_timed: bool = False) -> "CudaEvent":
        """Return an event that no stream comes to yet. With `is_timed`, `elapsed_ms` takes it.

        Get the event of a copy or a kernel before it starts: there may be no room for an event, and the end of work
        that has started without one cannot be awaited.
        """
        idle = self._idle_events[is_timed]
        try:
            handle = idle.popleft()
        except IndexError:
            handle = c_void_p()
            self.call("cuEventCreate", ctypes.byref(handle), 0 if is_timed else _NO_TIMING)
        return CudaEvent(handle, idle)

    def record(self, stream: c_void_p | int, event: "CudaEvent | None" = None) -> "CudaEvent":
        """Have `stream` reach `event`, or a new event, after its work so far; return the event."""
        event = event or self.new_event()
        self.call("cuEventRecord", event.handle, stream)
        return event

    def wait_on(self, stream: c_void_p | int, *events: "CudaEvent") -> None:
        """Make `stream` wait for the events, without making the host wait."""
        for event in events:
            self.call("cuStreamWaitEvent", stream, event.handle, 0)

    def check_caller(self, stream: int) -> None:
        """Check that a stream of the caller can order work.

        Raises:
            ArgumentError: the stream is being captured. Its events would draw the engine's streams into the capture.
            CudaError: the driver does not know the stream.
        """
        found = c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(found))
        if found.value:
            raise ArgumentError(
                f"stream {stream:#x} is being captured, and a graph cannot hold operations of multiring; end the "
                "capture first"
            )

    def ignore_captures(self) -> None:
        """Let this thread make calls that the captures of other threads would forbid, and that would spoil these."""
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(c_int(_RELAXED)))

    @contextmanager
    def ignoring_captures(self) -> Iterator[None]:
        """Let this thread, which may be the program's, make such calls inside the block."""
        mode = c_int(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # the mode before

    def has_happened(self, event: "CudaEvent") -> bool:
        """Return whether a stream has come to the event.

        Raises:
            CudaError: the device has an error.
        """
        code = self._functions["cuEventQuery"](event.handle)
        if code not in (0, _NOT_READY):
            raise self._error("cuEventQuery", code)
        return bool(code == 0)

    def elapsed_ms(self, first: "CudaEvent", last: "CudaEvent") -> float:
        """Return the device's milliseconds between two timed events that have happened. The host does not wait."""
        found = c_float()
        self.call("cuEventElapsedTime", ctypes.byref(found), first.handle, last.handle)
        return found.value


def _forked() -> StateError:
    return StateError(
        "this process was forked after CUDA was initialised, and CUDA does not work in it; start processes with the "
        "method spawn"
    )


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class CudaEvent:
    """A recorded event. Its handle is used again when nothing refers to it any more."""

    def __init__(self, handle: c_void_p, idle: "deque[c_void_p]") -> None:
        self.handle = handle
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.handle)
