"""Behaviours of the CUDA runtime, called through ctypes. See behaviours.py."""

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

CUDA: dict[str, Callable[[], Any]] = {}
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
    c = ctypes.CDLL(None)  # a preloaded stand-in takes precedence
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


# --- Streams and events -----------------------------------------------------------------------------------------------


@cuda
def codes_while_a_stream_works() -> list[int]:
    """Query a stream and an event during their work and after it; return the codes and the last error."""
    c, one, mark = runtime(), stream(), event()
    occupy(one)
    c.cudaEventRecord(mark, one)
    early = [c.cudaStreamQuery(one), c.cudaEventQuery(mark), c.cudaGetLastError()]
    return [*early, c.cudaEventSynchronize(mark), c.cudaStreamQuery(one), c.cudaEventQuery(mark)]


@cuda
def blocking_stream_waits_for_the_legacy_stream() -> dict[str, list[int]]:
    """Check for both kinds of streams whether they wait for the legacy stream, and it for them."""
    c, found, null = runtime(), {}, ctypes.c_void_p(0)
    for name, flags in (("blocking", 0), ("non-blocking", NON_BLOCKING)):
        one, mark = stream(flags), event()
        occupy(null)
        c.cudaEventRecord(mark, one)
        first = c.cudaEventQuery(mark)
        c.cudaDeviceSynchronize()
        c.cudaGetLastError()
        occupy(one)
        c.cudaEventRecord(mark, null)
        second = c.cudaEventQuery(mark)
        c.cudaDeviceSynchronize()
        found[name] = [first, second]
        c.cudaGetLastError()
    return found


@cuda
def a_wait_means_the_record_before_it() -> list[int]:
    """Record an event again after a wait for it: the waiting stream must not wait for the second record."""
    c, slow, waiting, mark, after = runtime(), stream(), stream(), event(), event()
    c.cudaEventRecord(mark, slow)
    c.cudaStreamWaitEvent(waiting, mark, 0)
    occupy(slow)
    c.cudaEventRecord(mark, slow)
    c.cudaEventRecord(after, waiting)
    code = c.cudaEventSynchronize(after)
    return [code, c.cudaEventQuery(mark)]


@cuda
def an_event_may_be_destroyed_while_waited_for() -> list[int]:
    """Destroy an event, and the stream that recorded it, while another stream waits for it."""
    c, slow, waiting, mark, after = runtime(), stream(), stream(), event(), event()
    occupy(slow)
    c.cudaEventRecord(mark, slow)
    c.cudaStreamWaitEvent(waiting, mark, 0)
    codes = [c.cudaEventDestroy(mark), c.cudaStreamDestroy(slow)]
    c.cudaEventRecord(after, waiting)
    early = c.cudaEventQuery(after)
    c.cudaGetLastError()
    return [*codes, early, c.cudaEventSynchronize(after)]


@cuda
def elapsed_time() -> list[Any]:
    """Return the codes of cudaEventElapsedTime, before and after the work, and for events without timing."""
    c, one, span = runtime(), stream(), ctypes.c_float(-1)
    first, last = event(0), event(0)
    c.cudaEventRecord(first, one)
    occupy(one)
    c.cudaEventRecord(last, one)
    early = c.cudaEventElapsedTime(ctypes.byref(span), first, last)
    c.cudaEventSynchronize(last)
    late = c.cudaEventElapsedTime(ctypes.byref(span), first, last)
    without = c.cudaEventElapsedTime(ctypes.byref(span), event(), event())
    unrecorded = c.cudaEventElapsedTime(ctypes.byref(span), event(0), event(0))
    return [early, late, 50 < span.value < 5000, without, unrecorded]


@cuda
def host_function_runs_in_stream_order() -> list[Any]:
    """Run a host function after a copy; return the value that it saw, and the code of a CUDA call in it."""
    c, one, host, device = runtime(), stream(), pinned(8), device_memory(8)
    fill(device, 7, 8)
    seen: list[int] = []

    def function(_: Any) -> None:
        seen.append(value(host))
        seen.append(c.cudaStreamQuery(one))

    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    occupy(one)
    copy(host, device, 8, DEVICE_TO_HOST, one)
    code = c.cudaLaunchHostFunc(one, called, None)
    early = list(seen)
    c.cudaStreamSynchronize(one)
    return [code, early, seen]


@cuda
def wait_value_on_pinned_memory() -> list[Any]:
    """Let a stream wait until the host writes a number into pinned memory (cuStreamWaitValue32)."""
    c, one, mark, flag = runtime(), stream(), event(), pinned(64)
    driver = ctypes.CDLL("libcuda.so.1")
    attribute = ctypes.c_int(-1)
    codes = [driver.cuDeviceGetAttribute(ctypes.byref(attribute), 122, 0), attribute.value]
    codes.append(
        driver.cuStreamWaitValue32_v2(one, flag, ctypes.c_uint32(3), 0)
    )  # flag 0: wait for a value of 3 or more
    c.cudaEventRecord(mark, one)
    codes.append(c.cudaEventQuery(mark))
    ctypes.c_uint32.from_address(flag.value or 0).value = 3
    return [*codes, c.cudaEventSynchronize(mark)]


@cuda
def wait_value_on_registered_shared_memory() -> list[Any]:
    """Let a stream wait for a number in registered shared memory, and write another number there."""
    c, one, mark = runtime(), stream(), event()
    _, address, _ = shared(PAGE)
    driver, codes = ctypes.CDLL("libcuda.so.1"), [register(address, PAGE, PORTABLE)]
    codes.append(driver.cuStreamWaitValue32_v2(one, ctypes.c_void_p(address), ctypes.c_uint32(3), 0))
    codes.append(driver.cuStreamWriteValue32_v2(one, ctypes.c_void_p(address + 4), ctypes.c_uint32(9), 0))
    c.cudaEventRecord(mark, one)
    codes.append(c.cudaEventQuery(mark))
    ctypes.c_uint32.from_address(address).value = 3
    return [*codes, c.cudaEventSynchronize(mark), ctypes.c_uint32.from_address(address + 4).value]


@cuda
def a_stream_that_waits_for_a_value_for_ever_can_be_freed_by_the_host() -> list[int]:
    """Query a stream that waits for a value: the query returns at once, and the host can end the wait later."""
    c, one, flag = runtime(), stream(), pinned(64)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuStreamWaitValue32_v2(one, flag, ctypes.c_uint32(1), 0)
    early = c.cudaStreamQuery(one)
    other = stream()
    host, device = pinned(8), device_memory(8)
    copied = [copy(host, device, 8, DEVICE_TO_HOST, other), c.cudaStreamSynchronize(other)]
    ctypes.c_uint32.from_address(flag.value or 0).value = 1
    return [early, *copied, c.cudaStreamSynchronize(one)]


@cuda
def stream_priorities() -> list[int]:
    """Return the least and the greatest priority of streams."""
    least, greatest = ctypes.c_int(), ctypes.c_int()
    runtime().cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
    return [least.value, greatest.value]


@cuda
def wait_value_in_a_capture() -> list[Any]:
    """Capture a stream's wait for a number, and run the graph; return the codes of all calls."""
    c, flag, driver = runtime(), pinned(64), ctypes.CDLL("libcuda.so.1")
    one, graph, ready, mark = stream(), ctypes.c_void_p(), ctypes.c_void_p(), event()
    c.cudaStreamBeginCapture(one, 0)
    code = driver.cuStreamWaitValue32_v2(one, flag, ctypes.c_uint32(1), 0)
    ended = c.cudaStreamEndCapture(one, ctypes.byref(graph))
    if ended or code:
        return [code, ended]
    made = c.cudaGraphInstantiate(ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
    launched = c.cudaGraphLaunch(ready, one)
    c.cudaEventRecord(mark, one)
    early = c.cudaEventQuery(mark)
    ctypes.c_uint32.from_address(flag.value or 0).value = 1
    return [code, ended, made, launched, early, c.cudaEventSynchronize(mark)]


@cuda
def visible_devices() -> dict[str, Any]:
    """Count the devices under several values of CUDA_VISIBLE_DEVICES, with CUDA and with NVML."""
    text = """
        import ctypes, os, sys
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        n = ctypes.CDLL("libnvidia-ml.so.1")
        n.nvmlInit_v2()
        device, name, count = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_uint()
        n.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        n.nvmlDeviceGetUUID(device, name, 96)
        told = sys.argv[1].replace("UUID", name.value.decode())
        if told != "unset":
            os.environ["CUDA_VISIBLE_DEVICES"] = told
        n.nvmlDeviceGetCount_v2(ctypes.byref(count))
        c, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
        print(c.cuInit(0), c.cuDeviceGetCount(ctypes.byref(found)), found.value, count.value)
    """
    found = {}
    for told in ("unset", "", "0", "1", "-1", "0,0", "0,7", "7,0", "UUID", "GPU-0", "none"):
        done = subprocess.run(  # noqa: S603 -- our own
            [sys.executable, "-c", textwrap.dedent(text), told], capture_output=True, text=True, timeout=50, check=False
        )
        found[told] = done.stdout.split() or done.stderr[-100:]
    return found


@cuda
def threads_and_devices() -> dict[str, Any]:
    """Return the current device of a new thread, and the code of selecting a missing device."""
    c, found = runtime(), {}

    def ask() -> None:
        number = ctypes.c_int(-1)
        found["new thread"] = [c.cudaGetDevice(ctypes.byref(number)), number.value]

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    found["device 99"] = [c.cudaSetDevice(99), c.cudaGetLastError(), c.cudaGetLastError()]
    return found


# --- Memory -----------------------------------------------------------------------------------------------------------


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
        import sys; sys.path.insert(0, {str(Path.cwd())!r})
        import ctypes, mmap
        from benchmarks.studies.gpu.behaviours_cuda import *
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


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("on_device", ctypes.c_void_p),
        ("on_host", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


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
        about = _Attributes()
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


def device_memory_only(size: int) -> int:
    """Allocate device memory and leave it unset; return the code."""
    made = ctypes.c_void_p()
    return int(runtime().cudaMalloc(ctypes.byref(made), ctypes.c_size_t(size)))


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t and cudaIpcEventHandle_t."""

    _fields_ = (("bytes", ctypes.c_byte * 64),)


@cuda
def ipc_between_processes() -> Any:
    """Write to device memory from another process through its handle; then open the handle in this process."""
    c, handle, memory, host = runtime(), IpcHandle(), device_memory(1 << 22), pinned(8)
    code = c.cudaIpcGetMemHandle(ctypes.byref(handle), memory)
    text = f"""
        import sys; sys.path.insert(0, {str(Path.cwd())!r})
        import ctypes, os
        from benchmarks.studies.gpu.behaviours_cuda import *
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


# --- Errors that stay -------------------------------------------------------------------------------------------------


@cuda
def sticky_error() -> dict[str, Any]:
    """Make an assertion fail on the device; return the codes of later calls of all kinds."""
    torch = pytorch()

    c, one, mark, memory, host = runtime(), stream(), event(), device_memory(8), pinned(8)
    index = torch.tensor([99], device="cuda")
    torch.zeros(3, device="cuda")[index]
    _, address, _ = shared(PAGE)
    return {
        "synchronise": c.cudaDeviceSynchronize(),
        "last": [c.cudaGetLastError(), c.cudaGetLastError(), c.cudaPeekAtLastError()],
        "stream query": c.cudaStreamQuery(one),
        "stream synchronise": c.cudaStreamSynchronize(one),
        "event query": c.cudaEventQuery(mark),
        "event record": c.cudaEventRecord(mark, one),
        "event create": c.cudaEventCreateWithFlags(ctypes.byref(ctypes.c_void_p()), NO_TIMING),
        "malloc": device_memory_only(8),
        "copy": copy(host, memory, 8, DEVICE_TO_HOST, one),
        "register": c.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0),
        "free": c.cudaFree(memory),
        "free host": c.cudaFreeHost(host),
        "event destroy": c.cudaEventDestroy(mark),
        "stream destroy": c.cudaStreamDestroy(one),
        "device count": c.cudaGetDeviceCount(ctypes.byref(ctypes.c_int())),
        "set device": c.cudaSetDevice(0),
        "attributes": c.cudaPointerGetAttributes(ctypes.byref(_Attributes()), memory),
        "reset": c.cudaDeviceReset(),
        "malloc after reset": device_memory_only(8),
        "synchronise after reset": c.cudaDeviceSynchronize(),
    }


# --- Graphs -----------------------------------------------------------------------------------------------------------


def capturing(call: Callable[[Any, Any], Any], mode: int = 0) -> list[Any]:
    """Make a call during a capture; return its result, the capture's codes, and whether a graph was made."""
    c, one, side, graph = runtime(), stream(), stream(), ctypes.c_void_p()
    began = c.cudaStreamBeginCapture(one, mode)
    answer = call(one, side)
    ended = c.cudaStreamEndCapture(one, ctypes.byref(graph))
    c.cudaGetLastError()
    return [began, answer, ended, graph.value is not None]


@cuda
def calls_during_a_capture() -> dict[str, Any]:
    """Return the codes of calls during a capture in the strictest mode, on the captured and on other streams."""
    c, host, device = runtime(), pinned(64), device_memory(64)
    _, address, _ = shared(PAGE)
    before = event()
    c.cudaEventRecord(before, stream())

    def status(one: Any, _: Any) -> list[int]:
        found = ctypes.c_int(-1)
        return [c.cudaStreamIsCapturing(one, ctypes.byref(found)), found.value]

    def forked(*, join: bool) -> Callable[[Any, Any], Any]:
        def call(one: Any, side: Any) -> list[int]:
            mark, back = event(), event()
            codes = [c.cudaEventRecord(mark, one), c.cudaStreamWaitEvent(side, mark, 0), copy(host, device, 8, 2, side)]
            codes.append(c.cudaEventQuery(mark))
            if join:
                codes += [c.cudaEventRecord(back, side), c.cudaStreamWaitEvent(one, back, 0)]
            return codes

        return call

    def host_function(one: Any, _: Any) -> int:
        kept.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None))
        return int(c.cudaLaunchHostFunc(one, kept[-1], None))

    kept: list[Any] = []
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "status": status,
        "stream synchronise": lambda one, _: c.cudaStreamSynchronize(one),
        "stream query": lambda one, _: c.cudaStreamQuery(one),
        "other stream synchronise": lambda _, side: c.cudaStreamSynchronize(side),
        "device synchronise": lambda *_: c.cudaDeviceSynchronize(),
        "event query": lambda *_: c.cudaEventQuery(before),
        "event synchronise": lambda *_: c.cudaEventSynchronize(before),
        "wait for an event outside": lambda one, _: c.cudaStreamWaitEvent(one, before, 0),
        "malloc": lambda *_: device_memory_only(64),
        "register": lambda *_: c.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0),
        "pinned copy": lambda one, _: copy(host, device, 8, 2, one),
        "pageable copy": lambda one, _: copy(ctypes.create_string_buffer(8), device, 8, 2, one),
        "host function": host_function,
        "fork and join": forked(join=True),
        "fork without join": forked(join=False),
    }
    return {name: capturing(call) for name, call in calls.items()}


@cuda
def calls_beside_a_capture_of_another_mode() -> dict[str, Any]:
    """Return the codes of an allocation during a capture, for the modes global, thread-local and relaxed."""
    return {str(mode): capturing(lambda *_: device_memory_only(64), mode) for mode in (0, 1, 2)}
