"""Collectives that divide the rows of arrays, and collectives of several arrays, with Horovod's names.

The arrays are NumPy arrays, as in `array_collectives`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from multiring._arguments import shown, whole
from multiring._frontend.array_collectives import Array, allgather, broadcast, native, start_allgather, start_allreduce
from multiring._frontend.compression_names import Compression
from multiring._frontend.dtype_conversion import converted, converted_back, dtype_conversion
from multiring._frontend.errors import OperationError
from multiring._frontend.evaluation import gathered
from multiring._frontend.groups_without_arrays import meet_without_arrays
from multiring._frontend.handles import (
    Name,
    Named,
    PartsOfGroup,
    Pending,
    Several,
    fail_call,
    parts_of,
    submit,
)
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import LINEAR, Average, chosen_op, name_of
from multiring._frontend.signatures import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    REDUCESCATTER,
    REDUCTION,
    plain_signature,
    rows_signature,
)
from multiring._runtime import Group, Handle
from multiring.errors import ArgumentError, Signature


def reducescatter(
    array: Any,
    op: int | str = Average,
    *,
    name: str | None = None,
    process_set: ProcessSet | Members = global_process_set,
) -> Array:
    """Combine the arrays of all ranks, and return this rank's rows of the result.

    Rank r of n receives `rows // n` rows, and one row more if `r < rows % n`.

    Args:
        array: an array of the same shape and type on all ranks.
        op: Average or Sum, or their names.
        name: the ranks match calls by this name. By default they match unnamed calls in the order of the calls.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: `op` is neither Average nor Sum, or this rank is not in the set.
        CollectiveError: on every rank: the ranks' arguments differ, or a rank is gone.
    """
    found: Array = _start_reducescatter(members_of(process_set), array, op, name).wait()
    return found


def _start_reducescatter(members: Members, array: Any, op: int | str, name: Name, part: Signature = ()) -> Pending:
    number, given = chosen_op(op), np.ascontiguousarray(native(array))
    if number not in LINEAR:
        raise ArgumentError(f"reducescatter by op={op!r}: want Average or Sum; allreduce has the others")
    conversion = dtype_conversion(given.dtype.name, number, 1.0, members.size)
    sent = np.ascontiguousarray(converted(given, conversion, 1.0))

    def start(group: Group, label: str) -> Handle:
        return group.reduce_scatter_async(sent, op=conversion.op, label=label)

    def finish(found: Any) -> Array:
        return converted_back(np.array(found), conversion, given.dtype)

    more = ((REDUCTION, name_of(number)), *part)
    return submit(members, name, plain_signature(REDUCESCATTER, given.dtype.name, given.shape, more), start, finish)


def alltoall(
    array: Any,
    splits: Sequence[int] | Array | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet | Members = global_process_set,
) -> Any:
    """Send rows of `array` to each rank, and return the received rows in the senders' order.

    Args:
        array: the ranks' arrays may differ in the first dimension only.
        splits: the number of rows for each rank of the set. Rows beyond their sum are not sent. By default each rank
            receives equally many rows, and the number of rows must be a multiple of the number of ranks.
        name: as for `reducescatter`.
        process_set: as for `reducescatter`.

    Returns:
        The received rows; if `splits` is given, a pair of these rows and the number of rows from each rank, as int32.

    Raises:
        ArgumentError: `splits` or the number of rows does not fit, or this rank is not in the set.
        CollectiveError: on every rank: the ranks' arguments differ, or a rank is gone.
    """
    members, rows = members_of(process_set), np.ascontiguousarray(native(array))
    try:
        sent = row_counts(splits, len(rows), members.size)
    except ArgumentError as error:
        fail_call(members, name, ALLTOALL, error)
        raise

    def start(group: Group, label: str) -> Handle:
        return group.all_to_all_async(rows[: sum(sent)], splits=sent, label=label, with_rows=True, waits=True)

    def finish(found: Any) -> Any:
        received, counts = found
        return np.array(received) if splits is None else (np.array(received), np.array(counts, np.int32))

    return submit(members, name, rows_signature(ALLTOALL, rows.dtype.name, rows.shape), start, finish).wait()


def row_counts(splits: Sequence[Any] | Array | None, rows: int, ranks: int) -> list[int]:
    """Return the number of rows that an alltoall of `rows` rows sends to each of `ranks` ranks.

    Raises:
        ArgumentError: `splits` does not fit; or it is None, and the rows cannot be divided equally.
    """
    if splits is None:
        if rows % ranks:
            raise ArgumentError(f"alltoall of {rows} rows over {ranks} ranks: want a multiple of {ranks}, or splits")
        return [rows // ranks] * ranks
    try:
        found = [-1 if (count := whole(each)) is None else count for each in splits]
    except TypeError:  # no sequence
        found = []
    if len(found) != ranks or min(found) < 0 or sum(found) > rows:
        raise ArgumentError(
            f"splits={shown(splits)}: want {ranks} integers >= 0, one for each rank, that add up to at most the {rows} "
            "rows"
        )
    return found


def broadcast_(
    array: Array,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | Members = global_process_set,
) -> Array:
    """Overwrite `array`, a NumPy array, with that of rank `root_rank`, and return it.

    The arguments and errors are those of `broadcast`.
    """
    array[...] = broadcast(array, root_rank, name=name, process_set=process_set)
    return array


def grouped_allreduce(
    arrays: Sequence[Any],
    op: int | str = Average,
    *,
    compression: Any = Compression.none,
    name: str | None = None,
    process_set: ProcessSet | Members = global_process_set,
) -> list[Array]:
    """Return the `allreduce` of each of `arrays`; every rank passes the same number of arrays."""
    members = members_of(process_set)
    parts = _parts_of(members, name, ALLREDUCE, len(arrays))
    starts = [
        partial(start_allreduce, array, op, name=each, compression=compression, process_set=members, more=more)
        for array, (each, more) in zip(arrays, parts, strict=True)
    ]
    return _all_of(starts, PartsOfGroup(members, parts[0][0], ALLREDUCE, len(arrays)))


def grouped_reducescatter(
    arrays: Sequence[Any],
    op: int | str = Average,
    *,
    name: str | None = None,
    process_set: ProcessSet | Members = global_process_set,
) -> list[Array]:
    """Return the `reducescatter` of each of `arrays`; every rank passes the same number of arrays."""
    members = members_of(process_set)
    parts = _parts_of(members, name, REDUCESCATTER, len(arrays))
    starts = [
        partial(_start_reducescatter, members, array, op, each, more)
        for array, (each, more) in zip(arrays, parts, strict=True)
    ]
    return _all_of(starts, PartsOfGroup(members, parts[0][0], REDUCESCATTER, len(arrays)))


def _parts_of(members: Members, name: Name, operation: str, count: int) -> list[tuple[Named, Signature]]:
    """Return `parts_of`; if there are none, the other ranks hear of it, too."""
    try:
        return parts_of(members, name, count)
    except ArgumentError:
        with suppress(OperationError):
            meet_without_arrays(members, name, operation)
        raise


def _all_of(starts: Sequence[Callable[[], Any]], group: PartsOfGroup) -> list[Array]:
    """Start operations and return their results. If one fails, the names of the others can be used again."""
    started: list[Any] = []
    try:
        started.extend(start() for start in starts)
    except BaseException:
        Several(started, list).forget()
        raise
    found: list[Array] = Several(started, list, group).wait()
    return found


def grouped_allgather(
    arrays: Sequence[Any], *, name: str | None = None, process_set: ProcessSet | Members = global_process_set
) -> list[Array]:
    """Return the `allgather` of each of `arrays`; every rank passes the same number of arrays."""
    members = members_of(process_set)
    if not arrays:
        meet_without_arrays(members, name, ALLGATHER)
        return []
    parts = parts_of(members, name, len(arrays))
    starts = [
        partial(start_allgather, array, name=each, process_set=members, more=more)
        for array, (each, more) in zip(arrays, parts, strict=True)
    ]
    return _all_of(starts, PartsOfGroup(members, parts[0][0], ALLGATHER, len(arrays)))


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return the outputs of all ranks in rank order.

    The rows of arrays and the elements of lists are concatenated. The values of dicts and tuples are gathered one by
    one; values of dicts are matched by key. Every rank calls this function. A rank without samples passes arrays
    without rows.

    Raises:
        ArgumentError: an output is not an array, list, dict or tuple.
        CollectiveError: on every rank: outputs differ in keys or kinds, arrays differ in more than the number of their
            rows, or a rank is gone.
    """

    def rows(array: Any) -> Array:
        return allgather(array, process_set=process_set)

    return gathered(outputs, lambda value: isinstance(value, np.ndarray), rows, process_set)
