"""Execute requests: pass their arrays to a Group, and its results to the frameworks."""

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.adasum_reduction import start_adasum
from multiring._frontend.dtype_conversion import DtypeConversion, converted, converted_back, dtype_conversion
from multiring._frontend.errors import RefusedInternalError
from multiring._frontend.handles import Name, Pending, Repeat, submit
from multiring._frontend.process_sets import Members, world_rank_in
from multiring._frontend.reduce_ops import LINEAR, Adasum, name_of
from multiring._frontend.requests.declining import (
    BY_ROWS,
    FailedOperation,
    Finish,
    declined,
    fail_missing,
    first_mismatch,
)
from multiring._frontend.requests.first_steps import FirstStepsComparison, comparison_of
from multiring._frontend.requests.wanted import Wanted, wanted_of, whole_signature, wire_of
from multiring._frontend.signatures import (
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    PART,
    REDUCESCATTER,
    REDUCTION,
    SCALES,
    plain_signature,
    rows_signature,
    scales_text,
)
from multiring._native import Request
from multiring._runtime import Group, Handle
from multiring._runtime.arrays import Buffer, numpy_dtype
from multiring.errors import ArgumentError, MultiringError, Signature

_MOST_KEPT = 512  # the largest number of prepared calls


class Execution:
    """Executes the requests of one process set.

    Prepared calls are reused for requests with the same signature.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Whole | _Flagged | _Parameters | _Rows | FailedOperation] = {}

    def submit(self, members: Members, request: Request) -> Finish:
        """Start the request's operation; return a function that waits for it and stores the results.

        Raises:
            ArgumentError, CollectiveError: this rank alone could not start the operation.
        """
        known = self._known.get(request.signature)
        if known is None:
            wanted = wanted_of(request)
            known = _made(members, wanted)
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[request.signature] = known
        return known.submit(request)


class _Memory(NamedTuple):
    """A buffer that holds the arrays of a request back to back, and the operation on it, for repetition."""

    packed: NDArray[Any]
    repeat: Repeat | None  # None if the operation cannot be repeated


class _Whole:
    """An all_reduce, a broadcast or a barrier, whose results have the shapes of the arrays."""

    def __init__(self, members: Members, wanted: Wanted) -> None:
        self._members = members
        self._wanted = wanted
        self._name, self._signature = wanted.name, whole_signature(wanted)
        self._counts = [math.prod(shape) for shape in wanted.shapes]
        self._conversion = DtypeConversion(wanted.dtype, "sum", is_complex=False, is_plain=True)
        self._refusal: Exception | None = None
        self._root = 0
        self._free: list[_Memory] = []
        self._lock = threading.Lock()
        self._comparison = comparison_of(members, wanted.root) if wanted.collective == ALLREDUCE else None
        try:
            if wanted.collective == ALLREDUCE:
                self._conversion = dtype_conversion(wanted.dtype, wanted.op, wanted.postscale, members.size)
                _check_factors(wanted)
            elif wanted.collective == BROADCAST:
                self._root = world_rank_in(members, wanted.root)
        except ArgumentError as error:
            self._refusal = error
        is_scaled = wanted.collective == ALLREDUCE and (wanted.prescale != 1.0 or wanted.op == Adasum)
        self._is_plain = self._conversion.is_plain and not is_scaled
        self._is_direct = self._is_plain and len(self._counts) == 1

    def submit(self, request: Request) -> Finish:
        wanted = self._wanted
        if self._refusal is not None or wanted.collective == BARRIER:
            return self._submit_nothing()
        if self._comparison is not None:
            return self._submit_first(request, self._comparison)
        return self._submit(request)

    def _submit_first(self, request: Request, comparison: FirstStepsComparison) -> Finish:
        """Submit a request of one of the first steps, and compare the ranks before the request ends."""
        wanted = self._wanted
        arrays = [_view(request.input(part), shape, wanted.kind) for part, shape in enumerate(wanted.shapes)]
        compare = comparison.begin(wanted.sent_name, arrays)
        plain = self._submit(request)
        if comparison.is_over:
            self._comparison = None
        if compare is None:
            return plain

        def finish(asking: Request) -> None:
            plain(asking)
            compare()

        return finish

    def _submit(self, request: Request) -> Finish:
        if self._is_direct:
            return self._submit_direct(request)
        try:
            with self._lock:
                memory = self._free.pop() if self._free else _Memory(self._allocate(), None)
            packed, repeat = memory
            request.pack(packed.ctypes.data)
            sent = packed if self._is_plain else self._converted(packed)
        except (ArgumentError, MemoryError) as error:
            return declined(self._members, self._name, self._signature[0][1], error)
        again = repeat.start() if repeat is not None else None
        if again is not None:
            pending = again
        else:
            start, at_once = self._starting(sent)
            pending = submit(self._members, self._name, self._signature, start, _as_it_is, at_once)
            repeat = pending.repeat() if self._is_plain and self._name is not None else None

        def finish(asking: Request) -> None:
            self._wait(pending)
            found = packed if self._is_plain else self._converted_back(sent)  # kept alive while it is copied
            asking.unpack(found.ctypes.data)
            with self._lock:
                self._free.append(_Memory(packed, repeat))

        return finish

    def _submit_nothing(self) -> Finish:
        def start(group: Group, label: str) -> Handle:
            return group.barrier_async(label=label)

        pending = submit(self._members, self._name, self._signature, start, _as_it_is)

        def finish(_: Request) -> None:
            pending.wait()
            if self._refusal is not None:
                raise self._refusal

        return finish

    def _submit_direct(self, request: Request) -> Finish:
        """Combine the caller's array into the caller's result."""
        wanted = self._wanted
        shape, dtype = wanted.shapes[0], wanted.dtype
        if wanted.collective == BROADCAST:
            shape, dtype = (self._counts[0] * wanted.kind.itemsize,), "uint8"
        own = _buffer(request.input(0), shape, dtype)
        out = _buffer(request.output(0, wanted.shapes[0]), shape, dtype)

        def start(group: Group, label: str, *, waits: bool = False) -> Handle:
            if wanted.collective == BROADCAST:
                return group.broadcast_async(own, self._root, out=out, label=label)
            return group.all_reduce_async(
                own, name_of(wanted.op), out=out, wire=wire_of(wanted), label=label, waits=waits
            )

        def at_once(group: Group, label: str) -> Handle:
            return start(group, label, waits=True)

        pending = submit(self._members, self._name, self._signature, start, _as_it_is, at_once)
        return lambda _: self._wait(pending)

    def _wait(self, pending: Pending) -> None:
        """Wait for the operation. If the ranks' calls differ, fail those operations that only other ranks have."""
        try:
            pending.wait()
        except MultiringError as error:
            if not self._wanted.begins_call:
                raise first_mismatch(error) from error
            if self._name is not None:
                fail_missing(self._members, self._name, self._wanted, error)
            raise

    def _starting(self, sent: NDArray[Any]) -> tuple[Callable[[Group, str], Handle], Callable[[Group, str], Handle]]:
        wanted, conversion = self._wanted, self._conversion

        def start(group: Group, label: str, *, waits: bool = False) -> Handle:
            if wanted.collective == BROADCAST:
                return group.broadcast_async(sent.view(np.uint8), self._root, label=label)
            if wanted.op == Adasum:
                parts = np.split(sent, np.cumsum(self._counts)[:-1]) if len(self._counts) > 1 else [sent]
                return start_adasum(group, parts, label=label)
            # A single array keeps its shape, because a rank that has joined contributes an array of that shape.
            shape = (*wanted.shapes[0], *conversion.more) if len(wanted.shapes) == 1 else (-1,)
            return group.all_reduce_async(
                sent.reshape(shape), conversion.op, wire=wire_of(wanted), label=label, waits=waits
            )

        def at_once(group: Group, label: str) -> Handle:
            return start(group, label, waits=True)

        return start, at_once

    def _allocate(self) -> NDArray[Any]:
        wanted, count = self._wanted, sum(self._counts)
        if self._is_plain:
            memory = self._members.group.allocate(count * wanted.kind.itemsize, np.uint8)
            return memory.view(numpy_dtype(wanted.dtype)) if wanted.collective == ALLREDUCE else memory
        return np.empty(count, wanted.kind)

    def _converted(self, packed: NDArray[Any]) -> NDArray[Any]:
        """Return the array that the Group combines."""
        found = converted(packed, self._conversion, self._wanted.prescale).reshape(-1)
        memory = self._members.group.allocate(found.size, found.dtype)
        memory[...] = found
        return memory

    def _converted_back(self, combined: NDArray[Any]) -> NDArray[Any]:
        shaped = combined.reshape(sum(self._counts), *self._conversion.more)
        return np.ascontiguousarray(converted_back(shaped, self._conversion, self._wanted.kind))


class _Flagged:
    """An all_reduce whose last result is a flag of this process: 1 if the program must compare its parameters."""

    def __init__(self, members: Members, wanted: Wanted, comparison: FirstStepsComparison) -> None:
        self._shape = wanted.shapes[-1]
        self._kind = wanted.kind
        self._place = len(wanted.shapes) - 1
        self._comparison = comparison
        self._whole = _Whole(members, replace(wanted, shapes=wanted.shapes[:-1]))

    def submit(self, request: Request) -> Finish:
        before = self._comparison.steps
        plain = self._whole.submit(request)
        looks = before == 1 and not self._comparison.is_alone
        flag = np.full(self._shape, looks, self._kind)

        def finish(asking: Request) -> None:
            plain(asking)
            _put(asking.output(self._place, self._shape), flag)

        return finish


class _Parameters:
    """A request with parameters to compare before the second step. Usually only their fingerprints are sent."""

    def __init__(self, wanted: Wanted, comparison: FirstStepsComparison) -> None:
        self._wanted = wanted
        self._comparison = comparison

    def submit(self, request: Request) -> Finish:
        wanted = self._wanted
        arrays = [_view(request.input(part), shape, wanted.kind) for part, shape in enumerate(wanted.shapes)]
        return lambda _: self._comparison.compare(arrays)


def _made(members: Members, wanted: Wanted) -> "_Whole | _Flagged | _Parameters | _Rows | FailedOperation":
    if wanted.collective == BARRIER and wanted.wire is not None:
        return FailedOperation(members, wanted)
    comparison = None if wanted.collective == BROADCAST else comparison_of(members, wanted.root)
    if comparison is not None and comparison.watched.follows:
        return _Parameters(wanted, comparison)
    if comparison is not None and comparison.watched.flagged:
        if wanted.dtype == comparison.watched.flagged:
            return _Flagged(members, wanted, comparison)
        wanted = replace(wanted, root=0)
    return _Rows(members, wanted) if wanted.collective in BY_ROWS else _Whole(members, wanted)


class _Rows:
    """Collectives of rows. Each array has its own operation, and the ranks may have different numbers of rows."""

    def __init__(self, members: Members, wanted: Wanted) -> None:
        self._members = members
        self._wanted = wanted
        count = len(wanted.shapes)
        self._more: list[Signature] = [
            ((PART, f"{part} of {count}"),) if count > 1 else () for part in range(1, count + 1)
        ]
        if wanted.collective == REDUCESCATTER:
            more = ((REDUCTION, name_of(wanted.op)), (SCALES, scales_text(wanted.prescale, wanted.postscale)))
            self._more = [(*more, *each) for each in self._more]
        self._more[0] = (*self._more[0], *wanted.structure)  # the operations behind the first one depend on it
        # An unnamed operation has another number each time.
        self._names = None if wanted.sent_name is None else wanted.names("")

    def submit(self, request: Request) -> Finish:
        wanted = self._wanted
        names = self._names or wanted.names(self._members.next_number())
        parts = [self._submit_part(request, part, name) for part, name in enumerate(names)]

        def finish(asking: Request) -> None:
            failure: Exception | None = None
            for number, part in enumerate(parts):  # the memory and the names are in use until all have ended
                try:
                    part(asking)
                except Exception as error:  # noqa: BLE001 -- raised below
                    failure = failure or first_mismatch(error)
                    if not number and wanted.begins_call:
                        fail_missing(self._members, names[0], wanted, error)
            if failure is not None:
                raise failure

        return finish

    def _submit_part(self, request: Request, part: int, name: Name) -> Finish:
        wanted, shape, more = self._wanted, self._wanted.shapes[part], self._more[part]
        signature_of = plain_signature if wanted.call.needs_equal_rows else rows_signature
        signature = signature_of(wanted.collective, wanted.dtype, shape, more)
        try:
            _check_rows(wanted, shape)
            if wanted.collective == REDUCESCATTER:
                return self._submit_scatter(request, part, name)
            splits = self._splits(shape) if wanted.collective == ALLTOALL else None
        except (ArgumentError, RefusedInternalError) as error:
            return _refused(self._members, name, signature, error)
        width = math.prod(shape[1:]) * wanted.kind.itemsize
        own = _buffer(request.input(part), (shape[0] if splits is None else sum(splits), width), "uint8")

        def start(group: Group, label: str) -> Handle:
            if splits is None:
                return group.all_gather_async(own, label=label, with_rows=True, waits=True)
            return group.all_to_all_async(own, splits=splits, label=label, with_rows=True, waits=True)

        pending = submit(self._members, name, signature, start, _as_it_is)

        def finish(asking: Request) -> None:
            array, counts = pending.wait()
            _put(asking.output(part, (len(array), *shape[1:])), array)
            if asking.wants_rows:
                found = np.asarray(counts, np.int64)
                _put(asking.allocate(len(wanted.shapes) + part, found.shape), found)

        return finish

    def _submit_scatter(self, request: Request, part: int, name: Name) -> Finish:
        wanted, shape, members = self._wanted, self._wanted.shapes[part], self._members
        conversion = dtype_conversion(wanted.dtype, wanted.op, wanted.postscale, members.size)
        source = _view(request.input(part), shape, wanted.kind)
        sent: NDArray[Any] = source
        if not conversion.is_plain or wanted.prescale != 1.0:
            sent = np.ascontiguousarray(converted(source, conversion, wanted.prescale))

        def start(group: Group, label: str) -> Handle:
            own = _buffer(sent.ctypes.data, sent.shape, conversion.dtype, sent)
            return group.reduce_scatter_async(own, op=conversion.op, label=label)

        signature = plain_signature(REDUCESCATTER, wanted.dtype, shape, self._more[part])
        pending = submit(members, name, signature, start, _as_it_is)

        def finish(asking: Request) -> None:
            found = pending.wait()
            if not conversion.is_plain:
                found = np.ascontiguousarray(converted_back(found, conversion, wanted.kind))
            _put(asking.output(part, found.shape), found)

        return finish

    def _splits(self, shape: Sequence[int]) -> list[int]:
        ranks, splits = self._members.size, self._wanted.splits
        if splits is None:
            if shape[0] % ranks:
                raise ArgumentError(
                    f"alltoall of {shape[0]} rows over {ranks} ranks: want a multiple of the ranks, or splits"
                )
            return [shape[0] // ranks] * ranks
        if len(splits) != ranks or min(splits) < 0 or sum(splits) > shape[0]:
            raise ArgumentError(
                f"splits={list(splits)}: want {ranks} integers >= 0, one for each rank, that add up to at most the "
                f"{shape[0]} rows"
            )
        return list(splits)


def _check_factors(wanted: Wanted) -> None:
    if wanted.dtype == "bool" and (wanted.prescale, wanted.postscale) != (1.0, 1.0):
        raise ArgumentError(f"factors {wanted.prescale} and {wanted.postscale} for bool: want factors of 1, or numbers")


def _check_rows(wanted: Wanted, shape: Sequence[int]) -> None:
    if not shape:
        error = RefusedInternalError(
            f"{wanted.collective} of an array without dimensions: want at least one dimension, the rows"
        )
        error.is_argument = wanted.collective == REDUCESCATTER  # as in Horovod
        raise error
    if wanted.collective == REDUCESCATTER:
        if wanted.op not in LINEAR:
            raise RefusedInternalError(f"reducescatter by {name_of(wanted.op)}: want Average or Sum")
        _check_factors(wanted)


def _refused(members: Members, name: Name, signature: Signature, error: Exception) -> Finish:
    """Start an operation that raises `error` on the ranks with this signature, and a mismatch on the other ranks."""

    def start(group: Group, label: str) -> Handle:
        return group.barrier_async(label=label)

    pending = submit(members, name, signature, start, _as_it_is)

    def finish(_: Request) -> None:
        pending.wait()
        raise error

    return finish


def _buffer(address: int, shape: Sequence[int], dtype: str, owner: object = None) -> Buffer:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Buffer(address, tuple(shape), strides, dtype, owner)


def _view(address: int, shape: Sequence[int], kind: "np.dtype[Any]") -> NDArray[Any]:
    count = math.prod(shape) * kind.itemsize
    memory: Any = (ctypes.c_char * count).from_address(address) if count else bytearray()
    return np.frombuffer(memory, kind).reshape(shape)


def _put(address: int, array: NDArray[Any]) -> None:
    if array.nbytes:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)


def _as_it_is(result: Any) -> Any:
    return result
