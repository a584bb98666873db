"""Calls of the CUDA runtime through ctypes, for the experiments of this package, and the table of these."""

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

CUDA: dict[str, Callable[[], Any]] = {}
"""The experiments with the CUDA runtime, by name."""

LONG = 400_000_000  # clock cycles of work on the device: about a quarter of a second
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
NON_BLOCKING = 1  # a stream that does not wait for the legacy stream
NO_TIMING = 2
PORTABLE, READ_ONLY = 1, 8  # flags of cudaHostRegister
PAGE = mmap.PAGESIZE


def cuda(behaviour: Callable[[], Any]) -> Callable[[], Any]:
    """Add a behaviour to the table of this module."""
    CUDA[behaviour.__name__] = behaviour
    return behaviour


def loaded(part: str) -> str:
    """Return the path of a shared library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return next(line.split()[-1] for line in maps if part in line)


def pytorch() -> Any:
    """Return PyTorch, which is slow to import."""
    import torch  # noqa: PLC0415 -- slow

    return torch


@cache
def runtime() -> ctypes.CDLL:
    """Return PyTorch's CUDA runtime. The first call makes the context of device 0."""
    torch = pytorch()

    torch.zeros(1, device="cuda")
    c = ctypes.CDLL(None)  # a library that is loaded before all others takes precedence
    if not hasattr(c, "cudaHostRegister"):
        c = ctypes.CDLL(loaded("libcudart.so"))
    # Without types, ctypes would cut addresses that are Python integers to 32 bits.
    c.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return c


def stream(flags: int = NON_BLOCKING) -> ctypes.c_void_p:
    """Return a new stream."""
    made = ctypes.c_void_p()
    runtime().cudaStreamCreateWithFlags(ctypes.byref(made), flags)
    return made


def event(flags: int = NO_TIMING) -> ctypes.c_void_p:
    """Return a new event."""
    made = ctypes.c_void_p()
    runtime().cudaEventCreateWithFlags(ctypes.byref(made), flags)
    return made


def device_memory(size: int) -> ctypes.c_void_p:
    """Return the address of new device memory of `size` bytes, all 0."""
    made = ctypes.c_void_p()
    runtime().cudaMalloc(ctypes.byref(made), ctypes.c_size_t(size))
    fill(made, 0, size)
    return made


def fill(address: ctypes.c_void_p, byte: int, size: int) -> None:
    """Fill device memory, and wait, because a non-blocking stream does not wait for it."""
    runtime().cudaMemset(address, byte, ctypes.c_size_t(size))
    runtime().cudaStreamSynchronize(ctypes.c_void_p(0))


def pinned(size: int) -> ctypes.c_void_p:
    """Return the address of new pinned host memory of `size` bytes."""
    made = ctypes.c_void_p()
    runtime().cudaMallocHost(ctypes.byref(made), ctypes.c_size_t(size))
    ctypes.memset(made, 0, size)
    return made


def copy(to: Any, source: Any, size: int, kind: int, on: Any) -> int:
    """Copy asynchronously; return the error code."""
    return int(runtime().cudaMemcpyAsync(to, source, size, kind, on))


def occupy(on: Any) -> None:
    """Start work on a stream that takes about a quarter of a second."""
    torch = pytorch()

    with torch.cuda.stream(torch.cuda.ExternalStream(on.value or 0)):
        torch.cuda._sleep(LONG)  # noqa: SLF001 -- the only kernel of PyTorch that takes a chosen time


_mappings: list[mmap.mmap] = []  # a mapping without an owner would be unmapped


def shared(size: int) -> tuple[mmap.mmap, int, int]:
    """Return a mapping of new shared memory, its address and its descriptor. The mapping is never unmapped."""
    descriptor = os.memfd_create("gpu")
    os.ftruncate(descriptor, size)
    _mappings.append(mmap.mmap(descriptor, size))
    return _mappings[-1], ctypes.addressof(ctypes.c_char.from_buffer(_mappings[-1])), descriptor


def register(address: int, size: int, flags: int = 0) -> int:
    """Pin host memory; return the error code."""
    code = int(runtime().cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), flags))
    runtime().cudaGetLastError()
    return code


def unregister(address: int) -> int:
    """Undo `register`; return the error code."""
    code = int(runtime().cudaHostUnregister(ctypes.c_void_p(address)))
    runtime().cudaGetLastError()
    return code


def value(address: Any) -> int:
    """Return the byte of host memory at an address."""
    return ctypes.c_ubyte.from_address((address.value or 0) if isinstance(address, ctypes.c_void_p) else address).value


def program(text: str) -> Any:
    """Run a Python program in a new process; return what it printed, or its exit code and last line of error."""
    done = subprocess.run(  # noqa: S603 -- our own
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=50, check=False
    )
    return (
        done.stdout.split() if done.returncode == 0 else [done.returncode, done.stderr.strip().splitlines()[-1][:100]]
    )


class PointerAttributes(ctypes.Structure):
    """cudaPointerAttributes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("on_device", ctypes.c_void_p),
        ("on_host", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t and cudaIpcEventHandle_t."""

    _fields_ = (("bytes", ctypes.c_byte * 64),)


def device_memory_only(size: int) -> int:
    """Allocate device memory and leave it unset; return the code."""
    made = ctypes.c_void_p()
    return int(runtime().cudaMalloc(ctypes.byref(made), ctypes.c_size_t(size)))
