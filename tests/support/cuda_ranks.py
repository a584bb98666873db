"""Ranks on stand-in devices: the nccl engine, and arrays of another library on a stream of their own."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.standin.loading import load, runtime
from tests.support.lateness import stretched
from tests.support.ranks import Here

from multiring import Group
from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.engines.cuda_arrays import CudaArray
from multiring._runtime.engines.dlpack import exported
from multiring._runtime.engines.nccl import NcclEngine

EARLY_S = 0.2
RANKS_PER_HOST = {"shm": 1 << 30, "shm+tcp": 2, "tcp": 1}


def open_engine(here: Here, **settings: object) -> tuple[Group, NcclEngine, Group]:
    """Return the group in host memory, this rank's engine, and the group on it. `settings` are the stand-ins'."""
    per_host = RANKS_PER_HOST[here.engine]
    host = here.join()
    load(devices=4, **{"host": here.rank // per_host, **settings})
    engine = NcclEngine.open(host, here.rank % min(per_host, 4))
    return host, engine, host.on_engine(engine)


def reopen_engine(here: Here, host: Group, seed: int) -> tuple[NcclEngine, Group]:
    """Return a new engine of a twin group, whose streams have the delays of `seed`."""
    os.environ["STANDIN_SEED"] = str(seed)
    twin = host.twin()
    engine = NcclEngine.open(twin, here.rank)
    return engine, twin.on_engine(engine)


def device_array(group: Group, values: Any) -> CudaArray:
    """Return a copy of `values` in the memory of the group's device."""
    values = np.asarray(values)
    found: Any = group.allocate(values.shape, values.dtype.name)
    assert isinstance(found, CudaArray)
    return found.put(values)


def new_stream() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert runtime().cudaStreamCreateWithFlags(ctypes.byref(made), 1) == 0
    return made


class Hold:
    """Work on a stream that lasts until it is released."""

    def __init__(self, stream: ctypes.c_void_p | int) -> None:
        self._released = threading.Event()
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._released.wait(30) and None)
        assert runtime().cudaLaunchHostFunc(stream, self._function, None) == 0

    def release(self) -> None:
        self._released.set()


def have_time(is_early: Callable[[], bool], most_s: float = EARLY_S) -> bool:
    """Wait for at most `most_s` until something happens, often what must not; return whether it did."""
    end_s = time.monotonic() + stretched(most_s)
    while not (found := is_early()) and time.monotonic() < end_s:
        time.sleep(0.002)
    return found


def pinned_array(values: Any) -> NDArray[Any]:
    """Return a copy of `values` in pinned memory, which is never freed."""
    like, memory = np.asarray(values), ctypes.c_void_p()
    assert runtime().cudaMallocHost(ctypes.byref(memory), max(like.nbytes, 1)) == 0
    raw = (ctypes.c_char * like.nbytes).from_address(memory.value or 0)
    found: NDArray[Any] = np.frombuffer(memoryview(raw), like.dtype).reshape(like.shape)
    found[...] = like
    return found


class Copy:
    """A copy to pinned memory, which a stream makes when it comes to it."""

    def __init__(self, address: Any, like: NDArray[Any], stream: ctypes.c_void_p) -> None:
        self._c, self._end = runtime(), ctypes.c_void_p()
        self._values = pinned_array(like)
        assert self._c.cudaMemcpyAsync(self._values.ctypes.data, address, like.nbytes, 4, stream) == 0
        assert self._c.cudaEventCreateWithFlags(ctypes.byref(self._end), 2) == 0
        assert self._c.cudaEventRecord(self._end, stream) == 0

    def is_there(self) -> bool:
        return bool(self._c.cudaEventQuery(self._end) == 0)

    def get(self) -> NDArray[Any]:
        """Wait for the stream and return the values."""
        assert self._c.cudaEventSynchronize(self._end) == 0
        return self._values


class OtherArray:
    """An array of another library: it is written on a stream of its own, and its memory is used again when it goes."""

    def __init__(self, values: Any, device: int, *, is_held: bool = False) -> None:
        """Copy `values` to a device; with `is_held`, only after `hold` is released."""
        self._c, self._values = runtime(), np.ascontiguousarray(values)
        self._c.cudaSetDevice(device)
        self._device = device
        self._stream, self._address = new_stream(), ctypes.c_void_p()
        assert self._c.cudaMalloc(ctypes.byref(self._address), max(self._values.nbytes, 1)) == 0
        self.hold = Hold(self._stream) if is_held else None
        self.stream = self._stream.value or 0
        self._copy(self._address, self._values.ctypes.data, self._stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._values.shape,
            "typestr": self._values.dtype.str,
            "data": (self._address.value or 0, False),
            "strides": None,
            "stream": self.stream,
            "version": 3,
        }

    def now(self) -> NDArray[Any]:
        """Return what is in the memory now, whatever is still in flight."""
        found = np.empty_like(self._values)
        self._copy(found.ctypes.data, self._address, new_stream())
        return found

    def later(self) -> Copy:
        """Return a copy of what is in the memory when the array's stream comes to it."""
        return Copy(self._address, self._values, self._stream)

    def copy_of(self, array: CudaArray) -> Copy:
        """Return a copy of another array, on this array's stream."""
        return Copy(array.address, np.empty(array.shape, numpy_dtype(array.dtype)), self._stream)

    def _copy(self, to: Any, source: Any, stream: Any) -> None:
        assert self._c.cudaMemcpyAsync(to, source, self._values.nbytes, 4, stream) == 0

    def __del__(self) -> None:
        stream = new_stream()
        self._c.cudaMemsetAsync(self._address, 0x55, self._values.nbytes, stream)
        self._c.cudaStreamSynchronize(stream)


class ExchangedArray(OtherArray):
    """An array of a library that knows DLPack only, and only the form from before version 1."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("this library has no __cuda_array_interface__")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert stream is not None
        if stream != -1:
            event = ctypes.c_void_p()
            assert self._c.cudaEventCreateWithFlags(ctypes.byref(event), 2) == 0
            assert self._c.cudaEventRecord(event, self._stream) == 0
            assert self._c.cudaStreamWaitEvent(stream, event, 0) == 0
        name = self._values.dtype.name
        return exported(self, self._address.value or 0, self._device, self._values.shape, name, None)


def values_of(rank: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return small whole numbers, whose sums are exact in every type."""
    dice = np.random.default_rng([rank, *shape])
    return dice.integers(0, 2 if dtype == "bool" else 4, shape).astype(numpy_dtype(dtype))
