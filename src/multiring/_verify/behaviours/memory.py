"""Experiments with device memory, pinned memory, and other processes."""

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
from typing import Any

from multiring._verify.behaviours.calls import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    NO_TIMING,
    PAGE,
    READ_ONLY,
    IpcHandle,
    PointerAttributes,
    copy,
    cuda,
    device_memory,
    device_memory_only,
    event,
    fill,
    occupy,
    pinned,
    program,
    register,
    runtime,
    shared,
    stream,
    unregister,
    value,
)


@cuda
def register_parts_and_twice() -> dict[str, Any]:
    """Return the codes of registrations that overlap, are not aligned, or are undone in another order."""
    _, address, _ = shared(16 * PAGE)
    found: dict[str, Any] = {
        "all": register(address, 16 * PAGE),
        "inside": register(address + PAGE, PAGE),
        "undo inside": unregister(address + PAGE),
        "undo": unregister(address),
        "undo twice": unregister(address),
        "unaligned": register(address + 100, 1000),
        "same page": register(address + 2000, 100),
        "undo unaligned": unregister(address + 100),
        "undo same page": unregister(address + 2000),
        "empty": register(address, 0),
        "null": register(0, PAGE),
        "unmapped": register(address + (1 << 40), PAGE),
    }
    return found


@cuda
def register_two_mappings_of_the_same_memory() -> list[int]:
    """Register two mappings of the same shared memory, copy through one, and read through the other."""
    c = runtime()
    _, first, descriptor = shared(PAGE)
    mapping = mmap.mmap(descriptor, PAGE)
    second = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    device, one = device_memory(PAGE), stream()
    fill(device, 5, PAGE)
    codes = [register(first, PAGE), register(second, PAGE), copy(first, device, PAGE, DEVICE_TO_HOST, one)]
    c.cudaStreamSynchronize(one)
    return [*codes, value(second)]


@cuda
def register_in_two_processes() -> Any:
    """Register shared memory in this process and in another, which copies from its device into it."""
    _, address, descriptor = shared(PAGE)
    mine = register(address, PAGE)
    os.set_inheritable(descriptor, True)
    text = f"""
        import ctypes, mmap
        from multiring._verify.behaviours.calls import *
        m = mmap.mmap({descriptor}, PAGE)
        a = ctypes.addressof(ctypes.c_char.from_buffer(m)); c = runtime()
        d, s = device_memory(PAGE), stream(); fill(d, 6, PAGE)
        print(register(a, PAGE), copy(a, d, PAGE, 2, s), c.cudaStreamSynchronize(s), flush=True); import os; os._exit(0)
    """
    done = subprocess.run(  # noqa: S603 -- our own
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        pass_fds=[descriptor],
    )
    return [mine, done.stdout.split() or done.stderr[-200:], value(address), unregister(address)]


@cuda
def register_a_read_only_mapping() -> list[int]:
    """Register memory that the process may only read, without and with the read-only flag; return the codes."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _, _, descriptor = shared(PAGE)
    address = libc.mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    return [register(address, PAGE), register(address, PAGE, READ_ONLY)]


@cuda
def registered_memory_is_unmapped_and_mapped_again() -> list[int]:
    """Unmap memory that is still registered, map other memory there, and register the new memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    where = libc.mmap(None, PAGE, 3, 0x21, -1, 0)
    codes = [register(where, PAGE), libc.munmap(where, PAGE)]
    again = libc.mmap(where, PAGE, 3, 0x21 | 0x10, -1, 0)
    codes += [register(again, PAGE), unregister(again), register(again, PAGE)]
    device, one = device_memory(PAGE), stream()
    fill(device, 4, PAGE)
    codes += [copy(again, device, PAGE, DEVICE_TO_HOST, one), runtime().cudaStreamSynchronize(one), value(again)]
    return codes


@cuda
def pointer_attributes() -> dict[str, Any]:
    """Return the code, type and device of each kind of pointer, and whether its device address is the same."""
    c, found = runtime(), {}
    _, address, _ = shared(4 * PAGE)
    register(address, 2 * PAGE)
    device, host = device_memory(1024), pinned(1024)
    for name, pointer in {
        "device": device.value,
        "inside device": (device.value or 0) + 100,
        "pinned": host.value,
        "registered": address,
        "inside registered": address + PAGE + 8,
        "behind registered": address + 2 * PAGE,
        "null": 0,
        "wild": 1 << 46,
    }.items():
        about = PointerAttributes()
        code = c.cudaPointerGetAttributes(ctypes.byref(about), ctypes.c_void_p(pointer))
        c.cudaGetLastError()
        found[name] = [code, about.type, about.device, about.on_device == pointer]
    return found


@cuda
def copies_of_wrong_pointers() -> dict[str, int]:
    """Return the codes of copies with null, freed, wild and too short memory."""
    c, one, host, device = runtime(), stream(), pinned(64), device_memory(64)
    found = {
        "nothing": copy(None, None, 0, HOST_TO_DEVICE, one),
        "null": copy(None, host, 8, HOST_TO_DEVICE, one),
        "wrong kind": copy(device, device, 8, HOST_TO_DEVICE, one),
        "host as device": copy(host, host, 8, DEVICE_TO_DEVICE, one),
        "kind by address": copy(device, host, 8, 4, one),
        "unknown kind": copy(device, host, 8, 9, one),
        "synchronise": c.cudaStreamSynchronize(one),
        "last error": c.cudaGetLastError(),
        "last error again": c.cudaGetLastError(),
    }
    freed = device_memory(1 << 24)
    found["free"] = c.cudaFree(freed)
    found["free twice"] = c.cudaFree(freed)
    found["freed"] = copy(freed, host, 8, HOST_TO_DEVICE, one)
    found["usable"] = copy(device, host, 8, HOST_TO_DEVICE, one)
    return found


@cuda
def out_of_memory() -> list[Any]:
    """Return the codes of an allocation that is too large, of the last error, and of the next allocation."""
    c, made = runtime(), ctypes.c_void_p()
    code = c.cudaMalloc(ctypes.byref(made), ctypes.c_size_t(1 << 44))
    return [
        code,
        made.value,
        c.cudaPeekAtLastError(),
        c.cudaGetLastError(),
        c.cudaGetLastError(),
        device_memory(8).value is not None,
    ]


@cuda
def free_waits_for_the_device() -> list[int]:
    """Check whether calls that free or allocate memory wait for the work of another stream."""
    c, found = runtime(), []
    _, address, _ = shared(PAGE)
    register(address, PAGE)
    memory, host, one, mark = device_memory(1 << 22), pinned(PAGE), stream(), event()
    for call in (
        lambda: c.cudaFree(memory),
        lambda: unregister(address),
        lambda: c.cudaFreeHost(host),
        lambda: device_memory_only(1 << 22),
        lambda: pinned(PAGE),
        lambda: register(address, PAGE),
    ):
        occupy(one)
        c.cudaEventRecord(mark, one)
        call()
        found.append(c.cudaEventQuery(mark))
        c.cudaDeviceSynchronize()
        c.cudaGetLastError()
    return found


@cuda
def ipc_between_processes() -> Any:
    """Write to device memory from another process through its handle; then open the handle in this process."""
    c, handle, memory, host = runtime(), IpcHandle(), device_memory(1 << 22), pinned(8)
    code = c.cudaIpcGetMemHandle(ctypes.byref(handle), memory)
    text = f"""
        import ctypes, os
        from multiring._verify.behaviours.calls import *
        c, p, h = runtime(), ctypes.c_void_p(), IpcHandle.from_buffer_copy({bytes(handle)!r})
        c.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, IpcHandle, ctypes.c_uint]
        a = c.cudaIpcOpenMemHandle(ctypes.byref(p), h, 1); again = ctypes.c_void_p()
        b = c.cudaIpcOpenMemHandle(ctypes.byref(again), h, 1)
        print(a, b, again.value == p.value, c.cudaMemset(p, 8, ctypes.c_size_t(8)), c.cudaDeviceSynchronize(),
              c.cudaIpcCloseMemHandle(p), flush=True); os._exit(0)
    """
    theirs = program(text)
    c.cudaMemcpy(host, memory, ctypes.c_size_t(8), DEVICE_TO_HOST)
    opened = ctypes.c_void_p()
    c.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, IpcHandle, ctypes.c_uint]
    own = c.cudaIpcOpenMemHandle(ctypes.byref(opened), handle, 1)
    c.cudaGetLastError()
    of_host = c.cudaIpcGetMemHandle(ctypes.byref(IpcHandle()), host)
    c.cudaGetLastError()
    return [code, theirs, value(host), own, of_host]


@cuda
def ipc_handle_of_an_event() -> list[int]:
    """Return the codes of handles of an event for processes, with and without the flag."""
    c, found = runtime(), []
    for flags in (NO_TIMING, NO_TIMING | 4, 4):
        made = ctypes.c_void_p()
        found.append(c.cudaEventCreateWithFlags(ctypes.byref(made), flags))
        found.append(c.cudaIpcGetEventHandle(ctypes.byref(IpcHandle()), made) if made.value else -1)
        c.cudaGetLastError()
    return found


@cuda
def fork_after_the_context() -> list[int]:
    """Return the codes of CUDA calls in a forked child."""
    c, one = runtime(), stream()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        codes = [
            c.cudaStreamQuery(one),
            device_memory_only(8),
            c.cudaHostUnregister(ctypes.c_void_p(PAGE)),
            c.cudaDeviceSynchronize(),
            c.cudaGetLastError(),
        ]
        os.write(write, repr(codes).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return [int(each) for each in os.read(read, 1000).decode().strip("[]").split(",")]
