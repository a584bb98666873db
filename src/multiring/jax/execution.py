"""What a custom call does when its program runs, on one of XLA's threads."""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from multiring.frontend.dtype_conversion import dtype_conversion
from multiring.frontend.handles import submit
from multiring.frontend.process_sets import Members, global_process_set, members_of
from multiring.frontend.reduce_ops import chosen_op
from multiring.frontend.signatures import DATA_TYPE, OPERATION, REDUCTION, ROOT, SHAPE, WIRE
from multiring.jax.call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SMOOTH,
    Call,
    call_of,
    result_shape,
    sets,
)
from multiring.jax.ffi import Handler
from multiring.runtime import Group, Handle
from multiring.runtime.arrays import Buffer, numpy_dtype


def _execute(text: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    call = call_of(text)
    members = members_of(sets.get(call.process_set, global_process_set))
    by_type: dict[str, list[int]] = {}
    for index, (dtype, _) in enumerate(call.arrays):
        by_type.setdefault(dtype, []).append(index)
    for dtype, indices in by_type.items():
        shapes = [call.arrays[index][1] for index in indices]
        addresses = [(inputs[index], outputs[index]) for index in indices]
        if call.collective in {ALL_REDUCE, BROADCAST}:
            _run_whole(members, call, dtype, shapes, addresses)
        else:
            for shape, (source, target) in zip(shapes, addresses, strict=True):
                _run_rows(members, call, dtype, shape, (source, target))


def _run_whole(
    members: Members, call: Call, dtype: str, shapes: Sequence[tuple[int, ...]], addresses: Sequence[tuple[int, int]]
) -> None:
    """Combine, or broadcast, all arrays of one type as one."""
    counts = [math.prod(shape) for shape in shapes]
    conversion = None
    if call.collective == ALL_REDUCE:
        conversion = dtype_conversion(dtype, chosen_op(call.op), 1.0, members.size)
    if conversion is not None and not conversion.is_plain:
        _run_converted(members, call, dtype, shapes, addresses)
        return
    kind = numpy_dtype(dtype) if conversion is not None else np.dtype(np.uint8)
    scale = 1 if conversion is not None else _itemsize(dtype)
    total = sum(counts) * scale
    is_one = len(counts) == 1
    memory = members.group.allocate(0 if is_one else total, kind)
    place = _buffer(addresses[0][1], (total,), kind.name) if is_one else memory
    own = _buffer(addresses[0][0], (total,), kind.name) if is_one else None
    if own is None:
        _pack(
            memory,
            [(source, count * scale * kind.itemsize) for (source, _), count in zip(addresses, counts, strict=True)],
        )

    def start(group: Group, label: str) -> Handle:
        if call.collective == BROADCAST:
            return group.broadcast_async(
                place if own is None else own, call.root, out=None if own is None else place, label=label
            )
        return group.all_reduce_async(
            place if own is None else own,
            call.op,
            out=None if own is None else place,
            wire=_wire(call, dtype),
            label=label,
        )

    _wait(members, call, dtype, shapes, start)
    if own is None:
        _unpack(
            memory,
            [(target, count * scale * kind.itemsize) for (_, target), count in zip(addresses, counts, strict=True)],
        )


def _run_converted(
    members: Members, call: Call, dtype: str, shapes: Sequence[tuple[int, ...]], addresses: Sequence[tuple[int, int]]
) -> None:
    """Combine arrays of a type that a Group combines in another one: complex numbers, averages of integers."""
    conversion = dtype_conversion(dtype, chosen_op(call.op), 1.0, members.size)
    kind = np.dtype(dtype)
    views = [
        (_view(source, shape, kind), _view(target, shape, kind))
        for shape, (source, target) in zip(shapes, addresses, strict=True)
    ]
    flat = np.concatenate([source.reshape(-1) for source, _ in views])
    sent = flat.view(conversion.dtype) if conversion.is_complex else flat.astype(conversion.dtype)

    def start(group: Group, label: str) -> Handle:
        return group.all_reduce_async(sent, conversion.op, label=label)

    _wait(members, call, dtype, shapes, start)
    found = sent if conversion.divisor == 1 else np.trunc(sent / conversion.divisor)
    whole = found.view(kind) if conversion.is_complex else found.astype(kind)
    for (_, target), part in zip(views, np.split(whole, np.cumsum([each.size for each, _ in views])[:-1]), strict=True):
        target[...] = part.reshape(target.shape)


def _run_rows(members: Members, call: Call, dtype: str, shape: tuple[int, ...], addresses: tuple[int, int]) -> None:
    """Gather, scatter or exchange the rows of one array."""
    source, target = addresses
    result = result_shape(call.collective, shape, members.size)
    if call.collective == REDUCE_SCATTER:
        own, out = _buffer(source, shape, dtype), _buffer(target, result, dtype)
    else:
        width = math.prod(shape[1:]) * _itemsize(dtype)
        own, out = _buffer(source, (shape[0], width), "uint8"), _buffer(target, (result[0], width), "uint8")

    def start(group: Group, label: str) -> Handle:
        if call.collective == ALL_GATHER:
            return group.all_gather_async(own, out, label=label)
        if call.collective == ALL_TO_ALL:
            return group.all_to_all_async(own, out, label=label)
        return group.reduce_scatter_async(own, out, call.op, label=label)

    _wait(members, call, dtype, [shape], start)


def _wait(
    members: Members,
    call: Call,
    dtype: str,
    shapes: Sequence[tuple[int, ...]],
    start: Callable[[Group, str], Handle],
) -> None:
    signature = (
        (OPERATION, call.collective),
        (DATA_TYPE, dtype),
        (SHAPE, " ".join(map(str, shapes))),
        (REDUCTION, call.op),
        (ROOT, str(call.root)),
        (WIRE, str(call.wire)),
    )
    submit(members, f"{call.name}.{dtype}" if call.name else None, signature, start, lambda _: None).wait()


def _wire(call: Call, dtype: str) -> str | None:
    return call.wire if dtype == "float32" and call.op in SMOOTH else None


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def _buffer(address: int, shape: tuple[int, ...], dtype: str) -> Buffer:
    """Return memory that XLA keeps while its call runs."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Buffer(address, shape, strides, dtype, None)


def _view(address: int, shape: tuple[int, ...], kind: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    count = math.prod(shape) * kind.itemsize
    memory: Any = (ctypes.c_char * count).from_address(address) if count else bytearray()
    return np.frombuffer(memory, kind).reshape(shape)


def _pack(memory: "np.ndarray[Any, Any]", pieces: Sequence[tuple[int, int]]) -> None:
    at = memory.ctypes.data
    for address, size_bytes in pieces:
        ctypes.memmove(at, address, size_bytes)
        at += size_bytes


def _unpack(memory: "np.ndarray[Any, Any]", pieces: Sequence[tuple[int, int]]) -> None:
    at = memory.ctypes.data
    for address, size_bytes in pieces:
        ctypes.memmove(address, at, size_bytes)
        at += size_bytes


handler = Handler(_execute)
