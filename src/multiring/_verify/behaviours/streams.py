"""Experiments with streams, events, devices, and errors that stay."""

import ctypes
import subprocess
import sys
import textwrap
import threading
from typing import Any

from multiring._verify.behaviours.calls import (
    DEVICE_TO_HOST,
    NO_TIMING,
    NON_BLOCKING,
    PAGE,
    PORTABLE,
    PointerAttributes,
    copy,
    cuda,
    device_memory,
    device_memory_only,
    event,
    fill,
    occupy,
    pinned,
    pytorch,
    register,
    runtime,
    shared,
    stream,
    value,
)


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
        "attributes": c.cudaPointerGetAttributes(ctypes.byref(PointerAttributes()), memory),
        "reset": c.cudaDeviceReset(),
        "malloc after reset": device_memory_only(8),
        "synchronise after reset": c.cudaDeviceSynchronize(),
    }
