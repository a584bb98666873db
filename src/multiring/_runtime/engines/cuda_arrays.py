"""Arrays in device memory, and the memory of arrays that are gone, for reuse.

Several ranks: verified without GPUs only (docs/decisions/0115-nccl-engine.md).
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection
from ctypes import c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._runtime.arrays import Buffer, is_immutable, numpy_dtype
from multiring._runtime.engines.cuda_driver import CudaDriver, CudaEvent
from multiring._runtime.engines.dlpack import CUDA, Imported, exported, imported
from multiring.errors import ArgumentError, MultiringError

_NO_STREAM, _LEGACY_STREAM = -1, 1  # of DLPack, and of __cuda_array_interface__
_WITH_STREAM = 3  # the first version of __cuda_array_interface__ that names a stream


class DeviceBlocks:
    """Device memory for arrays.

    Blocks of freed arrays are used again for arrays of the same size. Freeing a block would make the host wait for all
    work of the device.
    """

    def __init__(self, driver: CudaDriver, rank: int) -> None:
        self._driver = driver
        self.rank = rank  # for errors
        self._free: dict[int, deque[tuple[int, tuple[CudaEvent, ...]]]] = defaultdict(deque)
        self._unknown: deque[int] = deque()  # blocks that a stream may still use, nobody knows until when

    @property
    def device(self) -> int:
        """The number of the device."""
        return self._driver.device

    def after(self, streams: Collection[int]) -> tuple[CudaEvent, ...]:
        """Return events after the work that streams of the caller have now.

        Raises:
            ArgumentError, CudaError: a stream is being captured, or is gone.
        """
        if streams:
            self._driver.enter()
        for each in streams:
            self._driver.check_caller(each)
        return tuple(self._driver.record(each) for each in streams)

    def have_wait(self, stream: int, events: tuple[CudaEvent, ...]) -> None:
        """Make a stream of the caller wait for events."""
        self._driver.enter()
        self._driver.check_caller(stream)
        self._driver.wait_on(stream, *events)

    def take(self, size_bytes: int) -> tuple[int, tuple[CudaEvent, ...]]:
        """Return the address of a block, and the events after which its last users no longer need it.

        Raises:
            ArgumentError: the device has no room.
        """
        try:
            return self._free[size_bytes].popleft()
        except IndexError:
            pass
        address = self._driver.allocate(size_bytes)
        if address is None:
            self._return_all()
            address = self._driver.allocate(size_bytes)
        if address is None:
            left, whole = self._driver.memory_left()
            raise ArgumentError(
                f"rank {self.rank}: no room for {size_bytes} bytes on device {self._driver.device}, which has {left} "
                f"of {whole} bytes left; free arrays there, or use smaller ones"
            )
        return address, ()

    def give_back(
        self, address: int, size_bytes: int, ready: tuple[CudaEvent, ...], streams: Collection[int] = ()
    ) -> None:
        """Keep the block for reuse, after the events `ready` and after the work of `streams` so far.

        Any thread may call this method.
        """
        try:
            last_use = (*ready, *self.after(streams))
        except MultiringError:  # a stream is gone or being captured, or the device has an error that stays
            self._unknown.append(address)
        else:
            self._free[size_bytes].append((address, last_use))

    def _return_all(self) -> None:
        """Free all blocks. The driver waits until no work of the device can use them."""
        while self._unknown:
            self._driver.free(self._unknown.popleft())
        for blocks in self._free.values():
            while blocks:
                self._driver.free(blocks.popleft()[0])


class CudaArray:
    """An array in device memory.

    `ready` are the events after which its contents are complete, and after which it is no longer read.
    """

    def __init__(self, blocks: DeviceBlocks, stream: c_void_p, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.size_bytes = math.prod(shape) * numpy_dtype(dtype).itemsize
        self._blocks, self._stream = blocks, stream
        self._taken_bytes = max(self.size_bytes, 1)
        self._users: set[int] = set()
        self.address, self.ready = blocks.take(self._taken_bytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._blocks.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule of the array; `stream` then waits for the contents. None is the legacy default stream.

        See the array API standard for the arguments. The memory is not used again before the work that `stream` has
        when the importing library lets go of the array.

        Raises:
            BufferError: a copy, or another device, was asked for.
            ArgumentError: `stream` is 0.
        """
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"copy={copy}, dl_device={dl_device}: want no copy, and the array's own device")
        if stream == 0:
            raise ArgumentError("stream=0 is ambiguous: want 1 for the legacy default stream, or another stream")
        if stream != _NO_STREAM:
            waiting = _LEGACY_STREAM if stream is None else stream
            self._blocks.have_wait(waiting, self.ready)
            self.use_on(waiting)
        address = self.address if self.size_bytes else 0
        return exported(self, address, self._blocks.device, self.shape, self.dtype, max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": numpy_dtype(self.dtype).str,
            "data": (self.address if self.size_bytes else 0, False),
            "strides": None,
            "stream": self._stream.value,
            "version": 3,
        }

    def use_on(self, stream: int) -> None:
        """Keep the memory, after this array is gone, until `stream` has done the work that it has by then.

        The stream must live until then. A handle's `order` and an export call this method.
        """
        self._users.add(stream)

    def put(self, values: Any) -> "CudaArray":
        """Copy `values` from the host, on the engine's stream for callers. The host does not wait.

        The caller may change or delete `values` at once.
        """
        driver = self._blocks._driver  # noqa: SLF001 -- two classes of one module
        source = np.ascontiguousarray(np.broadcast_to(np.asarray(values, numpy_dtype(self.dtype)), self.shape))
        driver.enter()
        if driver.device_of(source.ctypes.data) is not None:
            source = source.copy()  # CUDA reads pinned memory later, and other memory before the call returns
        event = driver.new_event()
        driver.wait_on(self._stream, *self.ready, *self._blocks.after(self._users))
        if source.nbytes:
            driver.call("cuMemcpyHtoDAsync_v2", self.address, source.ctypes.data, source.nbytes, self._stream)
        self.ready = (driver.record(self._stream, event),)
        return self

    def get(self) -> NDArray[Any]:
        """Return a copy on the host, after all operations on the array that have been started."""
        driver = self._blocks._driver  # noqa: SLF001
        found = np.empty(self.shape, numpy_dtype(self.dtype))
        driver.enter()
        driver.wait_on(self._stream, *self.ready)
        if found.nbytes:
            driver.call("cuMemcpyDtoHAsync_v2", found.ctypes.data, self.address, found.nbytes, self._stream)
        driver.call("cuStreamSynchronize", self._stream)
        return found

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._blocks.give_back(self.address, self._taken_bytes, self.ready, self._users)


class Foreign:
    """An array of another library, and the events after which its contents are complete."""

    def __init__(self, array: Any, ready: tuple[CudaEvent, ...]) -> None:
        self.array, self.ready = array, ready


def device_buffer(driver: CudaDriver, array: Any, imports: c_void_p, *, writes: bool) -> Buffer:
    """Return the device memory of an engine's array, or of another library's by `foreign_buffer`."""
    if isinstance(array, CudaArray):
        return Buffer(array.address, array.shape, _row_major(array.shape), array.dtype, array)
    return foreign_buffer(driver, array, imports, writes=writes)


def foreign_buffer(driver: CudaDriver, array: Any, imports: c_void_p, *, writes: bool) -> Buffer:
    """Return the memory of an array that supports DLPack or `__cuda_array_interface__`.

    `imports` is a stream that waits for the contents, if the array supports DLPack.

    Raises:
        ArgumentError: the array is read-only and `writes` is set, has gaps, or does not lie on the driver's device.
    """
    driver.enter()
    kind = type(array).__qualname__
    if (exchanged := _cuda_device_of(array)) is not None:
        _check_device(kind, exchanged, driver.device)
        stream: int | None = imports.value or 0
        given = imported(array, imports.value or 0)
    elif hasattr(array, "__cuda_array_interface__"):
        given = _interface_of(array)
        stream = array.__cuda_array_interface__.get("stream")
        if stream is None and array.__cuda_array_interface__["version"] < _WITH_STREAM:
            stream = _LEGACY_STREAM  # an older interface does not say where the array is in use
    else:
        raise ArgumentError(
            f"{kind} is not in device memory; want an array of the group's `allocate`, or one with DLPack or "
            "__cuda_array_interface__ on a CUDA device"
        )
    if writes and (given.is_read_only or is_immutable(array)):
        raise ArgumentError(f"{kind} is read-only; want an array that can be written, such as a copy")
    rows, is_empty = _row_major(given.shape), 0 in given.shape
    if given.strides is not None and not is_empty:
        for mine, theirs, length in zip(rows, given.strides, given.shape, strict=True):
            if mine != theirs and length > 1:
                raise ArgumentError(
                    f"{kind} of shape {given.shape} is not row-major; want a contiguous array, such as its copy"
                )
    if not is_empty:
        _check_device(kind, driver.device_of(given.address), driver.device)
    if stream is None:
        ready: tuple[CudaEvent, ...] = ()
    else:
        driver.check_caller(stream)
        ready = (driver.record(stream),)
    return Buffer(given.address, given.shape, rows, given.dtype, Foreign((array, given.capsule), ready))


def _cuda_device_of(array: Any) -> int | None:
    """Return the CUDA device on which DLPack finds the array; None if there is none."""
    kind, number = array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else (0, 0)
    return int(number) if int(kind) == CUDA else None


def _check_device(kind: str, found: int | None, wanted: int) -> None:
    if found != wanted:
        where = "not in device memory" if found is None else f"on device {found}"
        raise ArgumentError(f"{kind} is {where}; want an array on device {wanted}, the engine's")


def _interface_of(array: Any) -> Imported:
    """Return what `__cuda_array_interface__` tells of an array."""
    told = array.__cuda_array_interface__
    address, is_read_only = told["data"]
    dtype = numpy_dtype("bfloat16" if told["typestr"] == "<V2" else told["typestr"])
    given = told.get("strides")
    strides = None if given is None else tuple(each // dtype.itemsize for each in given)
    return Imported(address, -1, tuple(told["shape"]), strides, dtype.name, is_read_only, None)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
