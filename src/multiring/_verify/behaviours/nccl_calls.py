"""Experiments with NCCL on one GPU, called through ctypes."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from multiring._runtime.engines.nccl_library import UniqueId
from multiring._verify.behaviours.calls import event, loaded, occupy, pytorch, runtime, stream

NCCL: dict[str, Callable[[], Any]] = {}
INT8, INT32, FLOAT16, FLOAT32, BFLOAT16 = 0, 2, 6, 7, 9
SUM, AVERAGE = 0, 4
IN_PROGRESS = 7


def nccl(behaviour: Callable[[], Any]) -> Callable[[], Any]:
    """Add a behaviour to the table of this module."""
    NCCL["nccl_" + behaviour.__name__] = behaviour
    return behaviour


@cache
def library() -> ctypes.CDLL:
    """Return PyTorch's NCCL."""
    runtime()
    n = ctypes.CDLL(None)  # a library that is loaded before all others goes first
    if not hasattr(n, "ncclAllReduce"):
        n = ctypes.CDLL(loaded("libnccl.so"))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    n.ncclGetErrorString.restype = n.ncclGetLastError.restype = ctypes.c_char_p
    for name, types in {
        "ncclCommInitRank": [pointer, number, UniqueId, number],
        "ncclCommInitRankConfig": [pointer, number, UniqueId, number, pointer],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclReduceScatter": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclSend": [pointer, size, number, number, pointer, pointer],
        "ncclRecv": [pointer, size, number, number, pointer, pointer],
        "ncclCommGetAsyncError": [pointer, pointer],
        "ncclCommAbort": [pointer],
        "ncclCommDestroy": [pointer],
        "ncclCommFinalize": [pointer],
        "ncclGetLastError": [pointer],
        "ncclCommSplit": [pointer, number, number, pointer, pointer],
        "ncclCommRegister": [pointer, pointer, size, pointer],
        "ncclRedOpCreatePreMulSum": [pointer, pointer, number, number, pointer],
        "ncclRedOpDestroy": [number, pointer],
    }.items():
        getattr(n, name).argtypes = types
    return n


def unique_id() -> UniqueId:
    """Return a new id of a communicator."""
    made = UniqueId()
    library().ncclGetUniqueId(ctypes.byref(made))
    return made


@cache
def alone() -> ctypes.c_void_p:
    """Return a communicator of one rank."""
    made = ctypes.c_void_p()
    library().ncclCommInitRank(ctypes.byref(made), 1, unique_id(), 0)
    return made


def async_error(communicator: ctypes.c_void_p) -> list[int]:
    """Return the code of ncclCommGetAsyncError, and the error that it reports."""
    found = ctypes.c_int(-1)
    return [library().ncclCommGetAsyncError(communicator, ctypes.byref(found)), found.value]


def tensor(*values: float, dtype: str = "float32") -> Any:
    """Return a device tensor."""
    torch = pytorch()

    return torch.tensor(values, dtype=getattr(torch, dtype), device="cuda")


@nccl
def version() -> int:
    """Return NCCL's version, e.g. 22907."""
    found = ctypes.c_int()
    library().ncclGetVersion(ctypes.byref(found))
    return found.value


@nccl
def error_strings() -> list[str]:
    """Return NCCL's text of each code."""
    return [library().ncclGetErrorString(code).decode() for code in range(10)]


@nccl
def in_place_and_out_of_place() -> list[Any]:
    """Reduce over one rank, in place as average and out of place as sum."""
    torch = pytorch()

    n, comm, x, y, one = library(), alone(), tensor(3, 4), tensor(0, 0), stream()
    torch.cuda.synchronize()
    codes = [
        n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, AVERAGE, comm, one),
        n.ncclAllReduce(x.data_ptr(), y.data_ptr(), 2, FLOAT32, SUM, comm, one),
    ]
    torch.cuda.synchronize()
    return [*codes, x.tolist(), y.tolist()]


@nccl
def bad_arguments() -> dict[str, Any]:
    """Return the codes of wrong operations, types, roots, pointers, counts and peers, and NCCL's last text."""
    torch = pytorch()

    n, comm, x, one = library(), alone(), tensor(1, 2, 3, 4), stream()
    host = torch.ones(4)
    at = x.data_ptr()
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "operation": n.ncclAllReduce(at, at, 4, FLOAT32, 99, comm, one),
        "text": (n.ncclGetLastError(None) or b"").decode()[:80],
        "type": n.ncclAllReduce(at, at, 4, 77, SUM, comm, one),
        "null": n.ncclAllReduce(None, None, 4, FLOAT32, SUM, comm, one),
        "communicator": n.ncclAllReduce(at, at, 4, FLOAT32, SUM, None, one),
        "root": n.ncclBroadcast(at, at, 4, FLOAT32, 5, comm, one),
        "nothing": n.ncclAllReduce(at, at, 0, FLOAT32, SUM, comm, one),
        "nothing, null": n.ncclAllReduce(None, None, 0, FLOAT32, SUM, comm, one),
        "not aligned": n.ncclAllReduce(at + 1, at + 1, 2, FLOAT32, SUM, comm, one),
        "peer": n.ncclSend(at, 4, FLOAT32, 3, comm, one),
        "float8": n.ncclAllReduce(at, at, 4, 10, SUM, comm, one),
        "average of int32": n.ncclAllReduce(at, at, 4, INT32, AVERAGE, comm, one),
        "group end alone": n.ncclGroupEnd(),
        "last code": async_error(comm),
    }
    found["synchronise"] = runtime().cudaDeviceSynchronize()
    found["host pointer"] = n.ncclAllReduce(host.data_ptr(), host.data_ptr(), 4, FLOAT32, SUM, comm, one)
    found["synchronise after a host pointer"] = runtime().cudaDeviceSynchronize()
    return found


@nccl
def an_error_inside_a_group() -> list[Any]:
    """Make a wrong call in a group; return the code of the group's end, and whether the right call ran."""
    n, comm, x, y, one = library(), alone(), tensor(1, 2), tensor(0, 0), stream()
    runtime().cudaDeviceSynchronize()
    codes = [n.ncclGroupStart(), n.ncclAllReduce(x.data_ptr(), y.data_ptr(), 2, FLOAT32, SUM, comm, one)]
    codes += [n.ncclAllReduce(x.data_ptr(), y.data_ptr(), 2, FLOAT32, 99, comm, one), n.ncclGroupEnd()]
    runtime().cudaDeviceSynchronize()
    after = n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, comm, one)
    return [*codes, y.tolist(), after, async_error(comm)]


@nccl
def send_to_itself() -> list[Any]:
    """Send to and receive from the own rank in a group."""
    n, comm, x, y, one = library(), alone(), tensor(5, 6), tensor(0, 0), stream()
    runtime().cudaDeviceSynchronize()
    codes = [
        n.ncclGroupStart(),
        n.ncclSend(x.data_ptr(), 2, FLOAT32, 0, comm, one),
        n.ncclRecv(y.data_ptr(), 2, FLOAT32, 0, comm, one),
    ]
    codes.append(n.ncclGroupEnd())
    runtime().cudaDeviceSynchronize()
    return [*codes, y.tolist()]


@nccl
def is_asynchronous() -> list[int]:
    """Check whether a reduction returns while its stream still does earlier work."""
    n, comm, x, one, mark = library(), alone(), tensor(1, 2), stream(), event()
    n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, comm, one)
    runtime().cudaDeviceSynchronize()
    occupy(one)
    n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, comm, one)
    runtime().cudaEventRecord(mark, one)
    early = runtime().cudaEventQuery(mark)
    return [early, runtime().cudaEventSynchronize(mark)]


@nccl
def premultiplied_sum() -> list[Any]:
    """Reduce with a factor from host memory, before and after the custom operation is destroyed."""
    n, comm, x, one, op = library(), alone(), tensor(3, 3), stream(), ctypes.c_int()
    factor = ctypes.c_float(0.5)
    runtime().cudaDeviceSynchronize()
    codes = [n.ncclRedOpCreatePreMulSum(ctypes.byref(op), ctypes.addressof(factor), FLOAT32, 1, comm)]
    codes.append(n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, op.value, comm, one))
    codes.append(n.ncclRedOpDestroy(op.value, comm))
    codes.append(n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, op.value, comm, one))
    runtime().cudaDeviceSynchronize()
    return [*codes, x.tolist()]


def _two() -> list[Any]:
    """Make a communicator of two ranks by two threads on one GPU; return the codes and NCCL's last text."""
    n, made, codes, name = library(), [ctypes.c_void_p(), ctypes.c_void_p()], [-1, -1], unique_id()

    def make(rank: int) -> None:
        runtime().cudaSetDevice(0)
        codes[rank] = n.ncclCommInitRank(ctypes.byref(made[rank]), 2, name, rank)

    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    text = (n.ncclGetLastError(None) or b"").decode().partition(" :")[0]  # the rank that is told first varies
    return [*codes, text, [each.is_alive() for each in threads]]


@nccl
def two_ranks_on_one_gpu_in_one_process() -> list[Any]:
    """Make a communicator of two ranks on the same GPU, each rank in a thread of this process."""
    return _two()


class Config(ctypes.Structure):
    """The first fields of ncclConfig_t, with space for those that later versions add."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("rest", ctypes.c_int * 60),
    )


def _non_blocking() -> Config:
    """Return the configuration of a communicator whose calls do not wait (NCCL 2.14 and later)."""
    return Config(24, 0xCAFEBEEF, 21400, 0)


def _settled(communicator: ctypes.c_void_p, seconds: float) -> list[int]:
    """Wait until a communicator is no longer in progress."""
    end = time.monotonic() + seconds
    while (found := async_error(communicator))[1] == IN_PROGRESS and time.monotonic() < end:
        time.sleep(0.001)
    return found


@nccl
def non_blocking_communicator() -> dict[str, Any]:
    """Make a communicator of one rank that does not block, use it, finalize and destroy it."""
    n, made, config, one, x = library(), ctypes.c_void_p(), _non_blocking(), stream(), tensor(1, 2)
    runtime().cudaDeviceSynchronize()
    found: dict[str, Any] = {
        "init": n.ncclCommInitRankConfig(ctypes.byref(made), 1, unique_id(), 0, ctypes.byref(config))
    }
    found["settled"] = _settled(made, 30)
    found["reduce"] = n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, made, one)
    found["settled after reduce"] = _settled(made, 10)
    found["finalize"] = n.ncclCommFinalize(made)
    found["settled after finalize"] = _settled(made, 10)
    found["reduce after finalize"] = n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, made, one)
    found["destroy"] = n.ncclCommDestroy(made)
    return found


@nccl
def abort_while_a_rank_is_missing() -> dict[str, Any]:
    """Make and abort a communicator whose second rank is missing: neither call may wait for that rank."""
    n, made, config = library(), ctypes.c_void_p(), _non_blocking()
    began = time.monotonic()
    found: dict[str, Any] = {
        "init": n.ncclCommInitRankConfig(ctypes.byref(made), 2, unique_id(), 0, ctypes.byref(config))
    }
    found["init within 1 s"] = time.monotonic() - began < 1
    found["settled"] = _settled(made, 2)
    began = time.monotonic()
    found["abort"] = n.ncclCommAbort(made)
    found["abort within 2 s"] = time.monotonic() - began < 2
    return found


@nccl
def two_processes_on_one_gpu() -> Any:
    """Make a communicator of two processes on the same GPU; return each one's code and NCCL's last text."""
    text = (
        "import os, sys;"
        "from multiring._verify.behaviours.nccl_calls import *;"
        "n, made = library(), ctypes.c_void_p();"
        "name = unique_id() if sys.argv[1] == '0' else UniqueId.from_buffer_copy(bytes.fromhex(sys.argv[2]));"
        "print(bytes(name).hex() if sys.argv[1] == '0' else '', flush=True);"
        "code = n.ncclCommInitRank(ctypes.byref(made), 2, name, int(sys.argv[1]));"
        "print(code, (n.ncclGetLastError(None) or b'').decode()[:120], flush=True); os._exit(0)"
    )
    one = subprocess.Popen([sys.executable, "-c", text, "0"], stdout=subprocess.PIPE, text=True)  # noqa: S603 -- our own
    name = one.stdout.readline().strip() if one.stdout else ""
    other = subprocess.run(  # noqa: S603 -- our own
        [sys.executable, "-c", text, "1", name],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    out, _ = one.communicate(timeout=20)
    return [out.strip(), other.stdout.strip()]


@nccl
def split_and_destroy() -> dict[str, Any]:
    """Split a communicator with and without a colour, destroy the parent, and use the child."""
    n, parent, child, none = library(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(1)
    n.ncclCommInitRank(ctypes.byref(parent), 1, unique_id(), 0)
    x, one = tensor(1, 2), stream()
    runtime().cudaDeviceSynchronize()
    found = {
        "split": n.ncclCommSplit(parent, 0, 0, ctypes.byref(child), None),
        "without a colour": n.ncclCommSplit(parent, -1, 0, ctypes.byref(none), None),
        "is null": none.value is None,
        "destroy the parent": n.ncclCommDestroy(parent),
        "use the child": n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, child, one),
    }
    found["synchronise"] = runtime().cudaDeviceSynchronize()
    found["abort the child"] = n.ncclCommAbort(child)
    return found


@nccl
def captured_in_a_graph() -> list[Any]:
    """Capture a reduction over one rank, which is a copy, and replay it."""
    torch = pytorch()

    n, comm, x, y = library(), alone(), tensor(1, 2), tensor(0, 0)
    n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, comm, stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        code = n.ncclAllReduce(
            x.data_ptr(), y.data_ptr(), 2, FLOAT32, SUM, comm, torch.cuda.current_stream().cuda_stream
        )
    before = y.tolist()
    graph.replay()
    torch.cuda.synchronize()
    return [code, before, y.tolist()]


@nccl
def after_a_sticky_error() -> dict[str, Any]:
    """Make an assertion fail on the device; then use, query and abort a communicator."""
    torch = pytorch()

    n, comm, x, one = library(), alone(), tensor(1, 2), stream()
    torch.zeros(3, device="cuda")[torch.tensor([99], device="cuda")]
    runtime().cudaDeviceSynchronize()
    found: dict[str, Any] = {"reduce": n.ncclAllReduce(x.data_ptr(), x.data_ptr(), 2, FLOAT32, SUM, comm, one)}
    found["text"] = (n.ncclGetLastError(None) or b"").decode()[:100]
    found["asynchronous error"] = async_error(comm)
    began = time.monotonic()
    found["abort"] = n.ncclCommAbort(comm)
    found["abort within 5 s"] = time.monotonic() - began < 5
    return found
