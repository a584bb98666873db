"""One communicator of NCCL: made by all ranks of a group, used by one thread, aborted after a failure.

Several ranks: verified without GPUs only (docs/decisions/0115-nccl-engine.md).
"""

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.nccl_library import IN_PROGRESS, NcclConfig, NcclError, NcclLibrary, UniqueId
from multiring._runtime.group.compile import Request
from multiring._schedule import Collective, Splits
from multiring.errors import StallError, UnsupportedError

_TYPES = {
    "int8": 0,
    "uint8": 1,
    "bool": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "average": 4}
_BOOL_OPS = {"sum": "max", "product": "min"}  # any and all
_BYTE = 0
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
_ABORT_S = 0.5  # how long the device's thread waits for an abort


def check_reduction(request: Request) -> None:
    """Raise UnsupportedError if NCCL does not compute what multiring promises for the request."""
    if request.collective not in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
        return
    if request.dtype not in _TYPES:
        raise UnsupportedError(f"NCCL does not reduce {request.dtype}; want one of {', '.join(_TYPES)}")
    if request.op == "average" and "float" not in request.dtype:
        raise UnsupportedError(
            f"NCCL's average of {request.dtype} may wrap, unlike multiring's; use a sum, or arrays in host memory"
        )
    if request.wire:
        raise UnsupportedError("NCCL has no wire types; use wire=None on the engine nccl")


class NcclCommunicator:
    """This rank's end of a communicator. All methods but `abort` are called by the device's thread."""

    def __init__(self, library: NcclLibrary, handle: c_void_p, rank: int, size: int) -> None:
        self._library, self._handle = library, handle
        self._rank, self._size = rank, size
        self._aborting: threading.Thread | None = None

    @classmethod
    def make(
        cls, library: NcclLibrary, name: bytes, place: tuple[int, int], check: Callable[[], None], timeout_s: float
    ) -> "NcclCommunicator":
        """Join the communicator `name` as rank `place[0]` of `place[1]`.

        `check` is called again and again, and raises if another rank has failed.

        Raises:
            NcclError: NCCL refuses.
            StallError: another rank did not join in time.
        """
        rank, size = place
        made = c_void_p()
        config = NcclConfig.non_blocking()
        library.call(
            "ncclCommInitRankConfig",
            ctypes.byref(made),
            size,
            UniqueId.from_buffer_copy(name),
            rank,
            ctypes.byref(config),
        )
        communicator = cls(library, made, rank, size)
        try:
            communicator.settle(check, timeout_s)
        except BaseException:
            communicator.abort()
            raise
        return communicator

    def settle(self, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until NCCL has finished the last call. It usually has."""
        began, pause_s = time.monotonic(), _SHORTEST_S
        while state := self._library.state_of(self._handle):
            if state != IN_PROGRESS:
                raise self._library.error_of("NCCL", state, self._handle)
            check()
            if time.monotonic() - began > timeout_s:
                raise StallError(f"NCCL: a rank of the {self._size} did not take part within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def failure(self) -> Exception | None:
        """Return the error of an operation in progress; None if there is none."""
        state = self._library.state_of(self._handle)
        return None if state in (0, IN_PROGRESS) else self._library.error_of("NCCL", state, self._handle)

    def abort(self) -> None:
        """End all operations of the communicator, finished or not. No other method may be called afterwards.

        NCCL may wait for other work of the device, such as an operation of another communicator that waits for a rank
        that has died, and that this thread must abort, too. So another thread waits, and this one only for a while.
        """
        if self._aborting is not None:
            return
        self._aborting = threading.Thread(target=self._call_abort, name="multiring nccl abort", daemon=True)
        self._aborting.start()
        self._aborting.join(_ABORT_S)

    def has_aborted(self) -> bool:
        """Return whether NCCL has ended an abort, so that it puts nothing on a stream any more."""
        return self._aborting is not None and not self._aborting.is_alive()

    def _call_abort(self) -> None:
        with suppress(NcclError):  # the communicator is given up in any case
            self._library.call("ncclCommAbort", self._handle)

    def put(self, request: Request, buffers: tuple[Buffer | None, Buffer], stream: c_void_p) -> None:
        """Put a collective on the stream. NCCL may still be in progress with it afterwards: see `settle`."""
        source, target = buffers
        at = target.address
        match request.collective, source, request.counts:
            case Collective.ALL_REDUCE, _, _:
                self._call("ncclAllReduce", at, at, target.count, *self._reduction(request), stream)
            case Collective.BROADCAST, _, _:
                self._call("ncclBroadcast", at, at, target.size_bytes, _BYTE, request.root, self._handle, stream)
            case Collective.REDUCE_SCATTER, Buffer() as given, _:
                self._put_reduce_scatter(request, given, target, stream)
            case Collective.ALL_GATHER, Buffer() as given, counts:
                self._put_all_gather(self._each(counts), given, target, stream)
            case Collective.ALL_TO_ALL, Buffer() as given, Splits() as splits:
                self._put_all_to_all(splits, given, target, stream)

    def _reduction(self, request: Request) -> tuple[int, int, c_void_p]:
        op = _BOOL_OPS.get(request.op, request.op) if request.dtype == "bool" else request.op
        return _TYPES[request.dtype], _OPS[op], self._handle

    def _put_reduce_scatter(self, request: Request, source: Buffer, target: Buffer, stream: c_void_p) -> None:
        counts = self._each(request.counts)
        kind, op, handle = self._reduction(request)
        if len(set(counts)) == 1:
            self._call("ncclReduceScatter", source.address, target.address, counts[0], kind, op, handle, stream)
            return
        self._call("ncclGroupStart")
        at = source.address
        for rank, count in enumerate(counts):
            if count:
                into = target.address if rank == self._rank else at  # a rank may have no memory of its own
                self._call("ncclReduce", at, into, count, kind, op, rank, handle, stream)
            at += count * source.itemsize
        self._call("ncclGroupEnd")

    def _put_all_gather(self, counts: tuple[int, ...], source: Buffer, target: Buffer, stream: c_void_p) -> None:
        width = source.itemsize
        if len(set(counts)) == 1:
            size = counts[0] * width
            self._call("ncclAllGather", source.address, target.address, size, _BYTE, self._handle, stream)
            return
        self._call("ncclGroupStart")
        at = target.address
        for rank, count in enumerate(counts):
            if count:
                own = source.address if rank == self._rank else at
                self._call("ncclBroadcast", own, at, count * width, _BYTE, rank, self._handle, stream)
            at += count * width
        self._call("ncclGroupEnd")

    def _put_all_to_all(self, counts: Splits, source: Buffer, target: Buffer, stream: c_void_p) -> None:
        width, sent, received = source.itemsize, source.address, target.address
        self._call("ncclGroupStart")
        for rank, (out, back) in enumerate(zip(counts.send, counts.receive, strict=True)):
            if out:
                self._call("ncclSend", sent, out * width, _BYTE, rank, self._handle, stream)
            if back:
                self._call("ncclRecv", received, back * width, _BYTE, rank, self._handle, stream)
            sent, received = sent + out * width, received + back * width
        self._call("ncclGroupEnd")

    def _each(self, counts: object) -> tuple[int, ...]:
        """Return the number of elements of each rank."""
        return (counts,) * self._size if isinstance(counts, int) else tuple(counts)  # type: ignore[arg-type]

    def _call(self, name: str, *arguments: object) -> None:
        self._library.call(name, *arguments, communicator=self._handle)


def new_name(library: NcclLibrary) -> NDArray[np.uint8]:
    """Return the name of a new communicator, as bytes to pass to the other ranks."""
    name = UniqueId()
    library.call("ncclGetUniqueId", ctypes.byref(name))
    return np.array(list(bytes(name)), np.uint8)
