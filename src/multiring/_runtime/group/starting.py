"""Start the collectives and messages of a Group.

This module checks the arguments, finds the memory and posts the operation. Each function takes the group's next call
first. If the function fails after that, it reports the failure to the other ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from multiring._arguments import require_whole
from multiring._runtime.arrays import Buffer, buffer_of
from multiring._runtime.group.compile import Request
from multiring._runtime.group.handles import Handle, OperationHandle, SteppedHandle, in_background
from multiring._runtime.group.posting import Call, Calls, Work
from multiring._runtime.group.varying_rows import RowCalls, RowCollective, Rows
from multiring._schedule import Collective, Splits, wire_of
from multiring.errors import ArgumentError

Array = Any  # a NumPy array, an object with DLPack or the buffer protocol (_runtime/arrays.py), or an engine's array


def start_all_reduce(  # noqa: PLR0913 -- the arguments of Group.all_reduce
    calls: Calls, array: Array, op: str, out: Array | None, wire: str | None, label: str, *, waits: bool
) -> Handle:
    """Start `Group.all_reduce`."""
    return _all_reduce(calls, calls.next("all_reduce", label), array, op, out, wire, waits=waits)


def _all_reduce(  # noqa: PLR0913 -- the arguments of Group.all_reduce
    calls: Calls, call: Call, array: Array, op: str, out: Array | None, wire: str | None, *, waits: bool
) -> Handle:
    with calls.telling(call):
        buffer = calls.buffer_of(array, writes=True) if out is None else calls.copied(array, out)
        count, coded = buffer.count, wire_of(wire)
        request = Request(Collective.ALL_REDUCE, buffer.dtype, count, count, op, wire=coded)
        title = f"{call.name} {op} {_shown(buffer)}{f', wire {wire}' if coded else ''}"
        return calls.run(call, title, request, (None, buffer), out, waits=waits)


def start_agreement(calls: Calls, array: Array, op: str, label: str, *, waits: bool, warns: bool = True) -> Handle:
    """Start a small reduction that serves another operation, with the arguments of `Group.all_reduce`.

    Events, timelines and errors call it an "agreement", so that they have each all_reduce of the program once. With
    `warns=False`, the warning about a late rank is left to another operation, which waits for the same ranks.
    """
    handle = _all_reduce(calls, calls.next("agreement", label), array, op, None, None, waits=waits)
    if not warns and isinstance(handle, OperationHandle):
        handle.leave_warning()
    return handle


def start_reduce(calls: Calls, array: Array, root: int, op: str, label: str, *, waits: bool) -> Handle:
    """Start `Group.reduce`, which is an all_reduce.

    In it, all ranks other than the root use copies of their arrays.
    """
    call = calls.next("all_reduce", label)
    with calls.telling(call):
        root = rank_of(calls, "root", root)
        buffer = calls.buffer_of(array, writes=calls.own == root)
        shown, keeps = _shown(buffer), None
        if calls.own != root:
            keeps = calls.allocate(buffer.shape, buffer.dtype)
            buffer = calls.copied(array, keeps)
        request = Request(Collective.ALL_REDUCE, buffer.dtype, buffer.count, buffer.count, op)
        title = f"reduce {op} to rank {calls.ranks[root]} {shown}"
        return calls.run(call, title, request, (None, buffer), None, waits=waits)


def start_broadcast(calls: Calls, array: Array, root: int, out: Array | None, label: str, *, waits: bool) -> Handle:
    """Start `Group.broadcast`."""
    call = calls.next("broadcast", label)
    with calls.telling(call):
        root = rank_of(calls, "root", root)
        if out is None:
            buffer = calls.buffer_of(array, writes=calls.own != root)
        else:
            buffer = calls.copied(array, out, copies=calls.own == root)
        request = Request(Collective.BROADCAST, buffer.dtype, buffer.count, buffer.count, root=root)
        title = f"broadcast from rank {calls.ranks[root]} {_shown(buffer)}"
        return calls.run(call, title, request, (None, buffer), out, waits=waits)


def start_reduce_scatter(calls: Calls, array: Array, out: Array | None, op: str, label: str, *, waits: bool) -> Handle:
    """Start `Group.reduce_scatter`."""
    call = calls.next("reduce_scatter", label)
    with calls.telling(call):
        buffer, size = _rows(calls.buffer_of(array, writes=False)), len(calls.ranks)
        rows = [buffer.shape[0] // size + (rank < buffer.shape[0] % size) for rank in range(size)]
        width = math.prod(buffer.shape[1:])
        out, output = _out(calls, out, (rows[calls.own], *buffer.shape[1:]), buffer)
        counts = tuple(each * width for each in rows)
        request = Request(Collective.REDUCE_SCATTER, buffer.dtype, counts, buffer.count, op)
        title = f"reduce_scatter {op} {_shown(buffer)}"
        return calls.run(call, title, request, (buffer, output), out, waits=waits)


def start_all_gather(
    row_calls: RowCalls, array: Array, out: Array | None, label: str, *, with_rows: bool, waits: bool
) -> Callable[[], Array]:
    """Start `Group.all_gather`; return a function that waits for its result."""
    calls = row_calls.calls
    call = calls.next("all_gather", label)
    with calls.telling(call):
        buffer = _rows(calls.buffer_of(array, writes=False))

        def move(rows: list[int], total: int, agreed: str) -> RowCollective:
            start = sum(rows[: calls.own])
            whole, output = _out(calls, out, (total, *buffer.shape[1:]), buffer, own_row=start)
            width = math.prod(buffer.shape[1:])
            counts = tuple([each * width for each in rows])
            request = Request(Collective.ALL_GATHER, buffer.dtype, counts, total * width, agreed=agreed)
            return RowCollective(
                request=request, buffers=(buffer, output), result=(whole, rows) if with_rows else whole
            )

        title = f"all_gather of {_shown_rows(buffer)}"
        return row_calls.start(call, Rows(title=title, own=[buffer.shape[0]], column=0, move=move), waits=waits)


def start_all_to_all(  # noqa: PLR0913 -- the arguments of Group.all_to_all
    row_calls: RowCalls,
    array: Array,
    out: Array | None,
    splits: Sequence[int] | None,
    label: str,
    *,
    with_rows: bool,
    waits: bool,
) -> Callable[[], Array]:
    """Start `Group.all_to_all`; return a function that waits for its result."""
    calls = row_calls.calls
    call = calls.next("all_to_all", label)
    with calls.telling(call):
        buffer, size = _rows(calls.buffer_of(array, writes=False)), len(calls.ranks)
        sent = _splits(buffer, splits, size)

        def move(received: list[int], total: int, agreed: str) -> RowCollective:
            width = math.prod(buffer.shape[1:])
            whole, output = _out(calls, out, (sum(received), *buffer.shape[1:]), buffer)
            counts = Splits(tuple(rows * width for rows in sent), tuple(rows * width for rows in received))
            # The plan must not depend on one rank's splits, so every rank prices the job's mean buffer.
            request = Request(Collective.ALL_TO_ALL, buffer.dtype, counts, total * width // size, agreed=agreed)
            return RowCollective(
                request=request, buffers=(buffer, output), result=(whole, received) if with_rows else whole
            )

        title = f"all_to_all of {_shown_rows(buffer)}"
        return row_calls.start(call, Rows(title=title, own=sent, column=calls.own, move=move), waits=waits)


def start_barrier(calls: Calls, label: str, *, waits: bool) -> Handle:
    """Start `Group.barrier`."""
    work = Work(meets=True, repeated=(None, "sum"))
    return calls.post(calls.next("barrier", label), "barrier", work, waits=waits)


def start_message(calls: Calls, name: str, array: Array, peer: int, tag: int, *, waits: bool) -> Handle:
    """Start `Group.send` or `Group.recv`; `name` is "send" or "recv"."""
    peer = rank_of(calls, "to" if name == "send" else "source", peer)
    if peer == calls.own:
        raise ArgumentError(f"{name}: rank {peer} is this rank itself; copy the array instead")
    tag = number("tag", tag, 0)
    sender, receiver = (calls.own, peer) if name == "send" else (peer, calls.own)
    call = calls.message(name, sender, receiver, tag)
    with calls.telling(call):
        buffer = buffer_of(array, writes=name == "recv")
        program = calls.message_program(sender, receiver, buffer.count, buffer.dtype)
        ends = f"from rank {calls.ranks[sender]} to rank {calls.ranks[receiver]}"  # all texts give world ranks
        title = f"message {ends}, tag {tag}, {_shown(buffer)}"
        work = Work(program=program, size_bytes=buffer.size_bytes, output=buffer)
        return calls.post(call, title, work, waits=waits)


def agree_on_ranks(calls: Calls, ranks: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    """Wait until all ranks request the same subgroup; return its ranks and its key."""
    call = calls.next("subgroup")
    with calls.telling(call):
        chosen = tuple(rank_of(calls, "ranks", rank) for rank in ranks)
        if not chosen or len(set(chosen)) != len(chosen):
            raise ArgumentError(f"ranks={list(chosen)}: want at least one rank, and no rank twice")
        handle = calls.post(call, f"subgroup of ranks {list(chosen)}", Work(), waits=True)
    handle.wait()
    return chosen, calls.subgroup_key(call, chosen)


def chained(title: str, finish: Callable[[], Array], *, waits: bool) -> Handle:
    """Return a handle that runs `finish`.

    With `waits`, `finish` runs in the thread that calls the handle's `wait`, else in a new thread.
    """
    return SteppedHandle(finish) if waits else in_background(finish, title)


def rank_of(calls: Calls, what: str, rank: int) -> int:
    """Return `rank`, the value of the argument named `what`, as an integer.

    Raises:
        ArgumentError: `rank` is not a rank of the group.
    """
    return number(what, rank, 0, len(calls.ranks) - 1)


def number(what: str, value: object, least: int, most: int | None = None) -> int:
    """Return `value`, the value of the argument named `what`, as an integer.

    Raises:
        ArgumentError: `value` is not an integer, is below `least`, or is above `most`, the last rank of a group.
    """
    wanted = f"an integer >= {least}" if most is None else f"a rank of this group, {least} to {most}"
    return require_whole(what, value, least, most, wanted=wanted)


def _splits(buffer: Buffer, splits: Sequence[int] | None, size: int) -> list[int]:
    rows = buffer.shape[0]
    if splits is None:
        if rows % size:
            raise ArgumentError(f"{rows} rows for {size} ranks: want a multiple, or splits")
        return [rows // size] * size
    sent = [number("splits", each, 0) for each in splits]
    if len(sent) != size or sum(sent) != rows:
        raise ArgumentError(f"splits={sent}: want {size} numbers >= 0 that add up to the {rows} rows")
    return sent


def _out(
    calls: Calls, out: Array | None, shape: tuple[int, ...], source: Buffer, *, own_row: int | None = None
) -> tuple[Array, Buffer]:
    """Return `out`, or a new array.

    With `own_row`, `source` may be the part of `out` that begins at that row.
    """
    dtype = source.dtype
    if out is None:
        out = calls.allocate(shape, dtype)
        return out, calls.buffer_of(out, writes=True)
    found = calls.buffer_of(out, writes=True)
    if found.shape != shape or found.dtype != dtype or not found.is_row_major:
        raise ArgumentError(f"out of shape {found.shape}, {found.dtype}: want shape {shape}, {dtype}, row-major")
    own_bytes = 0 if own_row is None else own_row * math.prod(shape[1:]) * found.itemsize
    if own_row is not None and source.address == found.address + own_bytes:
        return out, found
    overlap = min(found.address + found.size_bytes, source.address + source.size_bytes)
    if overlap > max(found.address, source.address):
        raise ArgumentError("out shares memory with the array; want separate memory: ranks still read the array")
    return out, found


def _rows(buffer: Buffer) -> Buffer:
    if not buffer.shape:
        raise ArgumentError("array of no dimensions: want at least one, to cut rows from")
    if not buffer.is_row_major:
        raise ArgumentError(
            f"array of shape {buffer.shape} and strides {buffer.strides} (in elements): "
            "want the last dimension the fastest"
        )
    return buffer


def _shown(buffer: Buffer) -> str:
    order = "" if buffer.is_row_major else f", dimensions by stride {buffer.layout}"
    return f"{buffer.dtype} of shape {buffer.shape}{order}"


def _shown_rows(buffer: Buffer) -> str:
    return f"{buffer.dtype} rows of {'x'.join(map(str, buffer.shape[1:])) or 'scalar'}"
