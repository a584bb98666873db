"""Measure the rates and delays of this machine's GPU that the planner of collectives needs.

    python benchmarks/studies/gpu/rates.py [--save FILE]

It measures copies between host and device, the registration of shared memory, the host time of CUDA's and NCCL's calls,
and the delay from a finished copy to the host. The program needs one GPU and PyTorch with CUDA. Without a GPU, it
prints NOT RUN and ends with exit code 3. Times are medians in microseconds, rates are 10^9 bytes per second.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from multiring._verify.behaviours.calls import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    PORTABLE,
    copy,
    device_memory,
    event,
    pinned,
    pytorch,
    register,
    runtime,
    shared,
    stream,
    unregister,
)
from multiring._verify.behaviours.nccl_calls import BFLOAT16, FLOAT32, SUM, alone, library

NO_GPU = 3
SIZES = [1 << bits for bits in (10, 14, 16, 18, 20, 22, 24, 26, 28)]


def median_us(call: Callable[[], Any], times: int = 200) -> float:
    """Return the median host time of a call."""
    spans = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spans.append(time.perf_counter() - began)
    return round(statistics.median(spans) * 1e6, 2)


def copies() -> dict[str, Any]:
    """Measure copies of each size and kind of host memory, one direction and both."""
    c, found = runtime(), dict[str, Any]()
    largest = SIZES[-1]
    _, arena, _ = shared(largest)
    register(arena, largest, PORTABLE)
    pageable = ctypes.create_string_buffer(largest)
    device, back = device_memory(largest), device_memory(largest)
    kinds = {"pinned": pinned(largest).value, "shared, registered": arena, "pageable": ctypes.addressof(pageable)}
    other = pinned(largest).value
    one, two = stream(), stream()
    for name, host in kinds.items():
        rows = []
        for size in SIZES:
            times = 50 if size < 1 << 24 else 8

            def to(size: int = size, host: int | None = host) -> None:
                copy(device, host, size, HOST_TO_DEVICE, one)
                c.cudaStreamSynchronize(one)

            def back_(size: int = size, host: int | None = host) -> None:
                copy(host, device, size, DEVICE_TO_HOST, one)
                c.cudaStreamSynchronize(one)

            def both(size: int = size, host: int | None = host) -> None:
                copy(device, host, size, HOST_TO_DEVICE, one)
                copy(other, back, size, DEVICE_TO_HOST, two)
                c.cudaStreamSynchronize(one)
                c.cudaStreamSynchronize(two)

            spans = [median_us(each, times) for each in (to, back_, both)]
            rows.append([size, *spans, *(round(size / span / 1e3, 2) for span in spans)])
        found[name] = rows
    found["columns"] = ["bytes", "to_us", "from_us", "both_us", "to_GB_s", "from_GB_s", "each_of_both_GB_s"]
    return found


def chunks() -> dict[str, float]:
    """Measure the rate of copying 64 MiB from the device to registered memory, in pieces of several sizes."""
    c, whole = runtime(), 1 << 26
    _, arena, _ = shared(whole)
    register(arena, whole, PORTABLE)
    device, one = device_memory(whole), stream()
    mark, found = event(), {}
    for piece in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26):

        def call(piece: int = piece) -> None:
            for at in range(0, whole, piece):
                copy(arena + at, (device.value or 0) + at, piece, DEVICE_TO_HOST, one)
                c.cudaEventRecord(mark, one)
            c.cudaStreamSynchronize(one)

        found[f"{piece >> 10} KiB"] = round(whole / median_us(call, 10) / 1e3, 2)
    return found


def registrations() -> dict[str, Any]:
    """Measure how long shared memory takes to register and to unregister, untouched and touched."""
    found = {}
    for size in (1 << 20, 1 << 26, 1 << 30):
        for touched in (False, True):
            _, arena, _ = shared(size)
            if touched:
                ctypes.memset(arena, 1, size)
            began = time.perf_counter()
            register(arena, size, PORTABLE)
            middle = time.perf_counter()
            unregister(arena)
            end = time.perf_counter()
            found[f"{size >> 20} MiB, {'touched' if touched else 'untouched'}"] = [
                round((middle - began) * 1e6),
                round((end - middle) * 1e6),
            ]
    return found


def calls() -> dict[str, float]:
    """Measure the host time of calls on the path of an operation."""
    c, one, two, mark, host, device = runtime(), stream(), stream(), event(), pinned(4096), device_memory(4096)
    driver = ctypes.CDLL("libcuda.so.1")
    torch = pytorch()
    x, side = torch.ones(256, device="cuda"), torch.cuda.Stream()
    n, comm = library(), alone()
    flag, number = pinned(64), ctypes.c_uint32(0)
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    found = {}
    for name, call in {
        "event record": lambda: c.cudaEventRecord(mark, one),
        "event query": lambda: c.cudaEventQuery(mark),
        "event create and destroy": lambda: c.cudaEventDestroy(event()),
        "stream wait event": lambda: c.cudaStreamWaitEvent(two, mark, 0),
        "stream query": lambda: c.cudaStreamQuery(one),
        "copy 4 KiB to host": lambda: copy(host, device, 4096, DEVICE_TO_HOST, one),
        "wait value": lambda: driver.cuStreamWaitValue32_v2(one, flag, number, 0),
        "write value": lambda: driver.cuStreamWriteValue32_v2(one, flag, number, 0),
        "host function": lambda: c.cudaLaunchHostFunc(one, nothing, None),
        "torch add": lambda: x.add_(1),
        "torch current_stream": torch.cuda.current_stream,
        "torch wait_stream": lambda: side.wait_stream(torch.cuda.current_stream()),
        "torch empty": lambda: torch.empty(256, device="cuda"),
        "nccl all_reduce 1 KiB, one rank, in place": lambda: n.ncclAllReduce(
            x.data_ptr(), x.data_ptr(), 256, FLOAT32, SUM, comm, one
        ),
        "nccl all_reduce 1 KiB, one rank, out of place": lambda: n.ncclAllReduce(
            device, x.data_ptr(), 256, FLOAT32, SUM, comm, one
        ),
        "nccl get async error": lambda: n.ncclCommGetAsyncError(comm, ctypes.byref(ctypes.c_int())),
    }.items():
        c.cudaDeviceSynchronize()
        found[name] = median_us(call)
        c.cudaGetLastError()  # clear the "not ready" of a query, which the next call would return
    c.cudaDeviceSynchronize()
    return found


class SmallCopy:
    """A copy of 1 KiB to the host, with several ways to wait for its end."""

    def __init__(self) -> None:
        self.host, self.device, self.stream = pinned(4096), device_memory(4096), stream()
        self.polled, self.blocking = event(), event(2 | 1)
        self.where = ctypes.c_void_p((self.host.value or 0) + 2048)
        self.flag = ctypes.c_uint32.from_address(self.where.value or 0)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.counter = 0

    def start(self, mark: Any = None) -> None:
        """Start the copy, and record an event after it."""
        copy(self.host, self.device, 1024, DEVICE_TO_HOST, self.stream)
        if mark is not None:
            runtime().cudaEventRecord(mark, self.stream)

    def _poll(self) -> None:
        while runtime().cudaEventQuery(self.polled):
            pass

    def by_query(self) -> None:
        """Query an event in a loop."""
        self.start(self.polled)
        self._poll()

    def by_spinning(self) -> None:
        """Wait for an event in CUDA's usual way."""
        self.start(self.polled)
        runtime().cudaEventSynchronize(self.polled)

    def by_sleeping(self) -> None:
        """Wait for an event that lets the thread sleep."""
        self.start(self.blocking)
        runtime().cudaEventSynchronize(self.blocking)

    def by_written_value(self) -> None:
        """Let the stream write a number after the copy, and read this number in a loop."""
        self.counter += 1
        self.start()
        self.driver.cuStreamWriteValue32_v2(self.stream, self.where, ctypes.c_uint32(self.counter), 0)
        while self.flag.value != self.counter:
            pass

    def released_by_a_value(self) -> None:
        """Let the stream wait for a number before the copy; the host writes it at once."""
        self.counter += 1
        self.driver.cuStreamWaitValue32_v2(self.stream, self.where, ctypes.c_uint32(self.counter), 0)
        self.start(self.polled)
        self.flag.value = self.counter
        self._poll()


def delays() -> dict[str, float]:
    """Measure a small copy and the wait for its end, for each way of waiting."""
    small, found = SmallCopy(), {}
    for call in (
        small.by_query,
        small.by_spinning,
        small.by_sleeping,
        small.by_written_value,
        small.released_by_a_value,
    ):
        runtime().cudaDeviceSynchronize()
        found[call.__name__] = median_us(call)
        runtime().cudaGetLastError()  # clear the "not ready" of a query, which the next call would return
    return found


def conversions() -> dict[str, float]:
    """Measure conversions of 64 MiB of float32 on the device, in 10^9 bytes of float32 per second."""
    torch = pytorch()
    found: dict[str, float] = {}
    x = torch.randn(1 << 24, device="cuda")
    half = torch.empty(1 << 24, device="cuda", dtype=torch.bfloat16)
    work: dict[str, Callable[[], Any]] = {
        "to bfloat16": lambda: half.copy_(x),
        "to float32": lambda: x.copy_(half),
        "scale": lambda: x.mul_(0.5),
        "to bfloat16 and scale": lambda: torch.mul(x, 0.5, out=half),
        "to int8 with a scale for each 1024": lambda: (
            (x.view(-1, 1024) / (x.view(-1, 1024).abs().amax(1, keepdim=True) / 127)).round_().to(torch.int8)
        ),
    }
    for name, call in work.items():
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        found[name] = round((1 << 26) * 20 / (time.perf_counter() - began) / 1e9, 1)
    return found


def nccl_one_rank() -> dict[str, float]:
    """Measure an all-reduce of NCCL over one rank, out of place: it is a copy with NCCL's overhead."""
    torch = pytorch()
    n, comm, c, one = library(), alone(), runtime(), stream()
    x, y, found = (
        torch.ones(1 << 26, device="cuda", dtype=torch.bfloat16),
        torch.empty(1 << 26, device="cuda", dtype=torch.bfloat16),
        {},
    )
    for size in (1 << 10, 1 << 20, 1 << 26):

        def reduce(size: int = size) -> None:
            n.ncclAllReduce(x.data_ptr(), y.data_ptr(), size, BFLOAT16, SUM, comm, one)
            c.cudaStreamSynchronize(one)

        found[f"{2 * size} bytes"] = median_us(reduce, 50)
    return found


MEASUREMENTS: tuple[Callable[[], Any], ...] = (copies, chunks, registrations, calls, delays, conversions, nccl_one_rank)


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", help="file for the figures, as JSON")
    arguments = parser.parse_args()
    torch = pytorch()
    if not torch.cuda.is_available():
        print("NOT RUN: PyTorch sees no GPU")
        return NO_GPU
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    for measure in MEASUREMENTS:
        began = time.perf_counter()
        try:
            found[measure.__name__] = measure()
        except (AttributeError, RuntimeError) as error:  # an older driver or PyTorch; the other figures still count
            found[measure.__name__] = f"{type(error).__name__}: {error}"
        print(
            measure.__name__, json.dumps(found[measure.__name__]), f"({time.perf_counter() - began:.1f} s)", flush=True
        )
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
