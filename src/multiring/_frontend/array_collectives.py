"""Collectives with Horovod's names, for frameworks whose arrays are NumPy arrays or can be converted to them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.compression_names import Compression, wire_of
from multiring._frontend.dtype_conversion import converted, converted_back, dtype_conversion
from multiring._frontend.former_arguments import former_arguments
from multiring._frontend.handles import Name, Pending, submit
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of, world_rank_in
from multiring._frontend.reduce_ops import Average, chosen_op, name_of
from multiring._frontend.signatures import (
    ALLGATHER,
    BROADCAST,
    ROOT,
    allreduce_signature,
    plain_signature,
    rows_signature,
)
from multiring._runtime import Group, Handle
from multiring.errors import ArgumentError, Signature

Array = NDArray[Any]


@former_arguments(wire="compression")
def allreduce(
    array: Any,
    op: int | str = Average,
    *,
    name: str | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet | Members = global_process_set,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """Return `array` combined over the ranks, as a new array.

    Args:
        array: an array, or any value that `numpy.asarray` accepts; the same shape and type on all ranks.
        op: Average, Sum, Min, Max or Product, or its name.
        name: the ranks match calls by this name. By default they match unnamed calls in the order of the calls.
        compression: the type in which float32 travels between hosts: a member of `Compression`, or its name.
        process_set: the ranks that take part; by default all ranks.
        scales: factors of the input and of the result. An average of integers is truncated after the second factor.

    Raises:
        ArgumentError: `op` is unknown, or undefined for the type of `array`; `compression` is unknown; or
            this rank is not in the set.
        CollectiveError: on every rank: the ranks' arguments differ, or a rank is gone.
    """
    found: Array = start_allreduce(
        array, op, name=name, compression=compression, process_set=process_set, scales=scales
    ).wait()
    return found


def start_allreduce(  # noqa: PLR0913 -- the arguments of allreduce, and more terms
    array: Any,
    op: int | str = Average,
    *,
    name: Name = None,
    compression: Any = Compression.none,
    process_set: ProcessSet | Members = global_process_set,
    scales: tuple[float, float] = (1.0, 1.0),
    more: Signature = (),
) -> Pending:
    """Start an `allreduce`; `wait` of the result returns the new array.

    The caller may reuse `array` at once. `more` are further terms on which the ranks must agree.
    """
    members, number, given = members_of(process_set), chosen_op(op), native(array)
    if given.dtype == np.bool_ and scales != (1.0, 1.0):
        raise ArgumentError(f"factors {scales[0]} and {scales[1]} for bool: want factors of 1, or an array of numbers")
    wire = wire_of(compression)
    conversion = dtype_conversion(given.dtype.name, number, scales[1], members.size)
    out = np.array(converted(given, conversion, scales[0]), order="C")  # a row-major copy that is not shared

    def start(group: Group, label: str) -> Handle:
        return group.all_reduce_async(out, conversion.op, wire=wire, label=label)

    def finish(_: Any) -> Array:
        return converted_back(out, conversion, given.dtype)

    signature = allreduce_signature(given.dtype.name, given.shape, name_of(number), scales, wire)
    return submit(members, name, (*signature, *more), start, finish)


@former_arguments(root="root_rank")
def broadcast(
    array: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet | Members = global_process_set
) -> Array:
    """Return the array of rank `root_rank`, a rank of the whole job.

    The other arguments and the errors are as in `allreduce`.
    """
    members = members_of(process_set)
    root, out = world_rank_in(members, root_rank), np.array(native(array), order="C")

    def start(group: Group, label: str) -> Handle:
        return group.broadcast_async(out, root, label=label)

    def finish(_: Any) -> Array:
        return out

    signature = plain_signature(BROADCAST, out.dtype.name, out.shape, ((ROOT, str(root_rank)),))
    found: Array = submit(members, name, signature, start, finish).wait()
    return found


def allgather(array: Any, *, name: Name = None, process_set: ProcessSet | Members = global_process_set) -> Array:
    """Return all ranks' arrays, concatenated along the first dimension.

    The errors are as in `allreduce`.

    Args:
        array: at least one dimension. The ranks may have different numbers of rows, the first dimension.
        name: as for `allreduce`.
        process_set: as for `allreduce`.
    """
    found: Array = start_allgather(array, name=name, process_set=process_set, waits=True).wait()
    return found


def start_allgather(
    array: Any,
    *,
    name: Name = None,
    process_set: ProcessSet | Members = global_process_set,
    more: Signature = (),
    waits: bool = False,
) -> Pending:
    """Start an `allgather`.

    `more` are further terms on which the ranks must agree. With `waits`, the caller must wait for it next.
    """
    rows = np.ascontiguousarray(native(array))

    def start(group: Group, label: str) -> Handle:
        return group.all_gather_async(rows, label=label, waits=waits)

    def finish(found: Any) -> Array:
        return np.array(found)

    signature = rows_signature(ALLGATHER, rows.dtype.name, rows.shape, more)
    return submit(members_of(process_set), name, signature, start, finish)


def native(array: Any) -> Array:
    """Return `array` as a NumPy array in the machine's byte order."""
    found = np.asarray(array)
    return found.astype(found.dtype.newbyteorder("="), copy=False)
