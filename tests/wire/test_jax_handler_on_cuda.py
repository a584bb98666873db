"""The handler of JAX's CUDA programs, called as XLA calls it, on stand-ins of the driver. JAX itself is not needed."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.standin.loading import load, runtime
from tests.support.ranks import Here, report_of, run_ranks

import multiring._native
from multiring._frontend import lifecycle
from multiring._frontend.reduce_ops import Average, Sum
from multiring._frontend.requests import entry_address, execution
from multiring._frontend.requests.text import ALL_GATHER, ALL_REDUCE, JAX, call_text, name_of_call
from multiring.errors import ArgumentError

FLOAT32, INT32 = 11, 4  # XLA's numbers of types
EXECUTE = 3
INTERNAL, UNAVAILABLE, UNIMPLEMENTED = 13, 14, 12
FLOAT4 = 32  # a type that multiring does not have


class Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class Buffers(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
    )


class ByteSpan(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_char_p), ("len", ctypes.c_size_t))


class Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(ctypes.c_void_p)),
    )


class ErrorArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    )


class ErrorTextArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
    )


class StreamArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArgs))
GetText = ctypes.CFUNCTYPE(None, ctypes.POINTER(ErrorTextArgs))
GetStream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(StreamArgs))


class Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version", ctypes.c_byte * 24),
        ("internal_api", ctypes.c_void_p),
        ("create_error", MakeError),
        ("get_text", GetText),
        ("others", ctypes.c_void_p * 2),
        ("get_stream", GetStream),
    )


class CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("api", ctypes.POINTER(Api)),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", Buffers),
        ("rets", Buffers),
        ("attrs", Attributes),
        ("future", ctypes.c_void_p),
    )


class Xla:
    """XLA's side of a call, with arrays in device memory and one stream."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(multiring._native.__file__).parent / "_jax.so"))
        self._library.multiring_jax_use.argtypes = [ctypes.c_void_p]
        self._library.multiring_jax_use.restype = ctypes.c_char_p
        assert self._library.multiring_jax_use(entry_address()) == b""
        self._library.multiring_jax_cuda_handler.restype = ctypes.c_void_p
        self.c = runtime()
        self.stream = ctypes.c_void_p()
        assert self.c.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1) == 0
        self.errors: list[tuple[int, str]] = []
        self.has_stream = True
        self._kept: list[Any] = [MakeError(self._make_error), GetText(self._text), GetStream(self._get_stream)]
        make, text, get = self._kept
        self._api = Api(struct_size=ctypes.sizeof(Api), create_error=make, get_text=text, get_stream=get)

    def _make_error(self, made: Any) -> int:
        self.errors.append((made[0].errc, made[0].message.decode()))
        return len(self.errors)

    def _text(self, asked: Any) -> None:
        self._kept.append(self.errors[asked[0].error - 1][1].encode())
        asked[0].message = self._kept[-1]

    def _get_stream(self, asked: Any) -> int | None:
        if not self.has_stream:
            self.errors.append((UNAVAILABLE, "the executor has been destroyed"))
            return len(self.errors)
        asked[0].stream = self.stream.value
        return None

    def memory(self, values: np.ndarray[Any, Any]) -> ctypes.c_void_p:
        """Return device memory that gets `values` late: after 10 ms of other work of the stream."""
        address = ctypes.c_void_p()
        assert self.c.cudaMalloc(ctypes.byref(address), max(1, values.nbytes)) == 0
        self.c.standin_occupy(self.stream, 10_000)
        host = ctypes.c_void_p()
        assert self.c.cudaMallocHost(ctypes.byref(host), max(1, values.nbytes)) == 0
        ctypes.memmove(host, values.ctypes.data, values.nbytes)
        assert self.c.cudaMemcpyAsync(address, host, values.nbytes, 1, self.stream) == 0
        return address

    def values(self, address: ctypes.c_void_p, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return device memory as the stream's next work sees it."""
        found = np.empty_like(like)
        host = ctypes.c_void_p()
        assert self.c.cudaMallocHost(ctypes.byref(host), max(1, found.nbytes)) == 0
        assert self.c.cudaMemcpyAsync(host, address, found.nbytes, 2, self.stream) == 0
        assert self.c.cudaStreamSynchronize(self.stream) == 0
        ctypes.memmove(found.ctypes.data, host, found.nbytes)
        return found

    def buffer(self, address: ctypes.c_void_p, array: np.ndarray[Any, Any]) -> Buffer:
        dims = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
        self._kept.append(dims)
        kind = FLOAT32 if array.dtype == np.float32 else INT32
        return Buffer(dtype=kind, data=address.value, rank=array.ndim, dims=dims)

    def call(self, text: str, inputs: list[Buffer], results: list[Buffer]) -> bool:
        """Run the handler; return whether it succeeded."""
        span = ByteSpan(text.encode(), len(text.encode()))
        token = Buffer()
        lists = []
        for each in ([*inputs, token], [*results, token]):
            pointers = (ctypes.c_void_p * len(each))(*(ctypes.addressof(one) for one in each))
            lists.append(Buffers(size=len(each), args=pointers))
            self._kept += [pointers, each]
        attributes = (ctypes.c_void_p * 1)(ctypes.addressof(span))
        frame = CallFrame(
            api=ctypes.pointer(self._api),
            stage=EXECUTE,
            args=lists[0],
            rets=lists[1],
            attrs=Attributes(size=1, attrs=attributes),
        )
        return self._library.multiring_jax_cuda_handler(ctypes.byref(frame)) is None


def collectives(here: Here, seed: int) -> None:
    load(devices=1, seed=seed, delay_us=3000)
    lifecycle.init()
    xla, draws = Xla(), np.random.default_rng(seed)
    for step in range(8):
        shapes = [tuple(draws.integers(1, 40, draws.integers(0, 3))) for _ in range(3)]
        every = [
            [draws.integers(-99, 99, shape).astype(np.float32 if number else np.int32) for shape in shapes]
            for number in range(2)
            for _ in range(here.size)
        ]
        mine = [*every[here.rank], *every[here.size + here.rank]]
        sums = [sum(column) for half in (every[: here.size], every[here.size :]) for column in zip(*half, strict=True)]
        inputs = [xla.buffer(xla.memory(each), each) for each in mine]
        targets = [xla.memory(np.full_like(each, 77)) for each in mine]
        results = [xla.buffer(target, each) for target, each in zip(targets, mine, strict=True)]
        text = call_text(ALL_REDUCE, Sum, 0, "" if step % 2 else f"step{step}", root=0, wire=None)
        assert xla.call(text, inputs, results), xla.errors
        for target, total in zip(targets, sums, strict=True):
            np.testing.assert_array_equal(xla.values(target, np.asarray(total)), total)
        rows = draws.integers(0, 99, (here.size, 2, 3)).astype(np.int32)
        gathered = xla.memory(np.zeros((2 * here.size, 3), np.int32))
        text = call_text(ALL_GATHER, Sum, 0, "", root=0, wire=None)
        whole = rows.reshape(-1, 3)
        own = np.ascontiguousarray(rows[here.rank])
        assert xla.call(text, [xla.buffer(xla.memory(own), own)], [xla.buffer(gathered, whole)]), xla.errors
        np.testing.assert_array_equal(xla.values(gathered, whole), whole)


@pytest.mark.parametrize("seed", range(2))
def test_collectives(seed: int) -> None:
    run_ranks(collectives, 2, seed)


def no_room(_self: object) -> None:
    raise ArgumentError("no room for 40 bytes")


def declines(here: Here) -> None:
    """One rank cannot take part. The others are told, and do not take its next call for this one."""
    load(devices=1)
    lifecycle.init()
    xla, graph = Xla(), ctypes.c_void_p()
    ones = np.ones(5, np.float32)

    def buffers() -> tuple[list[Buffer], list[Buffer]]:
        return [xla.buffer(xla.memory(ones), ones)], [xla.buffer(xla.memory(ones), ones)]

    for kind, count in ((ALL_REDUCE, 1), (ALL_REDUCE, 2), (ALL_GATHER, 2)):
        mixed = [buffers() for _ in range(count)]
        xla.c.cudaStreamSynchronize(xla.stream)
        if here.rank == 1:
            assert xla.c.cudaStreamBeginCapture(xla.stream, 2) == 0
        text = call_text(kind, Average, 0, name_of_call(JAX, "named" if count > 1 else ""), root=0, wire=None)
        assert not xla.call(
            text, [each for one, _ in mixed for each in one], [each for _, one in mixed for each in one]
        )
        code, told = xla.errors[-1]
        assert code == (INTERNAL if here.rank == 1 else 9), told
        assert "XLA captures a CUDA graph, which cannot hold a collective" in told
        assert here.rank == 1 or "rank 1: " in told
        if here.rank == 1:
            assert xla.c.cudaStreamEndCapture(xla.stream, ctypes.byref(graph)) == 0
    # The same for a rank whose segment is full. It raises its own error.
    with pytest.MonkeyPatch.context() as patch:
        if here.rank == 1:
            patch.setattr(execution._Whole, "_allocate", no_room)
        (one, result), (other, further) = buffers(), buffers()
        assert not xla.call(call_text(ALL_REDUCE, Sum, 0, "", root=0, wire=None), one + other, result + further)
    code, told = xla.errors[-1]
    assert code == (3 if here.rank == 1 else 9), told
    assert "no room for 40 bytes" in told
    ones = np.full(5, here.rank, np.float32)
    text = call_text(ALL_REDUCE, Average, 0, "", root=0, wire=None)
    target = xla.memory(ones)
    assert xla.call(text, [xla.buffer(xla.memory(ones), ones)], [xla.buffer(target, ones)]), xla.errors
    np.testing.assert_array_equal(xla.values(target, ones), 0.5)


def test_a_rank_that_cannot_take_part_tells_the_others() -> None:
    report = report_of(declines, 2)
    assert [each.error for each in report.outcomes] == [None, None], report.outcomes


def refuses(here: Here) -> None:
    """As above, of a rank that gets no stream, and of one whose array has a type that multiring does not have."""
    load(devices=1)
    lifecycle.init()
    xla, ones = Xla(), np.ones(5, np.float32)

    def buffers() -> tuple[list[Buffer], list[Buffer]]:
        return [xla.buffer(xla.memory(ones), ones)], [xla.buffer(xla.memory(ones), ones)]

    for kind, count in ((ALL_REDUCE, 1), (ALL_GATHER, 2)):
        for code, reason in ((UNAVAILABLE, "the executor has been destroyed"), (UNIMPLEMENTED, "XLA's type 32")):
            mixed = [buffers() for _ in range(count)]
            xla.has_stream = here.rank == 0 or code != UNAVAILABLE
            for one, _ in mixed:
                one[0].dtype = FLOAT4 if here.rank == 1 and code == UNIMPLEMENTED else FLOAT32
            text = call_text(kind, Average, 0, "", root=0, wire=None)
            assert not xla.call(text, [one[0] for one, _ in mixed], [one[0] for _, one in mixed])
            xla.has_stream = True
            found, told = xla.errors[-1]
            assert found == (code if here.rank == 1 else 9), told
            assert reason in told
            assert here.rank == 1 or "rank 1: " in told
    target = xla.memory(ones)
    text = call_text(ALL_REDUCE, Sum, 0, "", root=0, wire=None)
    assert xla.call(text, buffers()[0], [xla.buffer(target, ones)]), xla.errors
    np.testing.assert_array_equal(xla.values(target, ones), 2)


def test_a_rank_that_is_refused_tells_the_others() -> None:
    report = report_of(refuses, 2)
    assert [each.error for each in report.outcomes] == [None, None], report.outcomes


def failures(here: Here) -> None:
    load(devices=1)
    lifecycle.init()
    xla = Xla()
    ones = np.ones(3 + here.rank, np.float32)
    text = call_text(ALL_REDUCE, Average, 0, "", root=0, wire=None)

    def buffers() -> tuple[list[Buffer], list[Buffer]]:
        return [xla.buffer(xla.memory(ones), ones)], [xla.buffer(xla.memory(ones), ones)]

    assert not xla.call(text, *buffers())
    ((code, told),) = xla.errors
    assert code == 9, "the code of a failed precondition"
    assert "rank 0: (3,); rank 1: (4,)" in told
    before = buffers()
    xla.c.cudaStreamSynchronize(xla.stream)
    xla.c.standin_fail(700, 0)
    assert not xla.call(text, *before)
    code, told = xla.errors[-1]
    assert code == INTERNAL
    assert "error 700 of CUDA" in told


def test_failures_are_told() -> None:
    report = report_of(failures, 2)
    assert [each.error for each in report.outcomes] == [None, None], report.outcomes
