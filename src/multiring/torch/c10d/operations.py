"""Collectives of a Group on memory that torch has laid out: sizes are known to all ranks, nothing is to be counted.

A Group's own all_gather and all_to_all take arrays whose ranks may differ in rows. Here torch says what every rank
brings, so that one operation does, whose title has the sizes for the ranks to agree on.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from multiring.errors import ArgumentError
from multiring.runtime import Group, Handle
from multiring.runtime.arrays import Buffer
from multiring.runtime.group.compile import Request
from multiring.runtime.group.handles import OperationHandle, in_background
from multiring.runtime.group.posting import Call, Calls, Work
from multiring.runtime.group.varying_rows import Move, RowCalls, Rows
from multiring.schedule import Collective, Splits


def all_reduce(calls: Calls, buffer: Buffer, op: str, title: str, *, waits: bool) -> OperationHandle:
    """Combine every rank's `buffer` into all of them."""
    count = buffer.shape[0]
    request = Request(Collective.ALL_REDUCE, buffer.dtype, count, count, op)
    return _run(calls, calls.next("all_reduce"), title, request, (None, buffer), waits=waits)


def broadcast(calls: Calls, memory: Buffer, root: int, title: str, *, waits: bool) -> OperationHandle:
    """Overwrite every rank's bytes with rank `root`'s."""
    count = memory.shape[0]
    request = Request(Collective.BROADCAST, memory.dtype, count, count, root=root)
    return _run(calls, calls.next("broadcast"), title, request, (None, memory), waits=waits)


def all_gather(
    calls: Calls, own: Buffer, out: Buffer, sizes: tuple[int, ...], title: str, *, waits: bool
) -> OperationHandle:
    """Fill the bytes of `out` with every rank's `own`, which has as many as `sizes` says; it may lie in its place."""
    request = Request(Collective.ALL_GATHER, "uint8", sizes, out.shape[0])
    return _run(calls, calls.next("all_gather"), title, request, (own, out), waits=waits)


def reduce_scatter(
    calls: Calls, buffers: tuple[Buffer, Buffer], counts: tuple[int, ...], op: str, title: str, *, waits: bool
) -> OperationHandle:
    """Combine every rank's first buffer and put this rank's part, of `counts` elements by rank, into the second."""
    source = buffers[0]
    request = Request(Collective.REDUCE_SCATTER, source.dtype, counts, source.shape[0], op)
    return _run(calls, calls.next("reduce_scatter"), title, request, buffers, waits=waits)


def exchange(
    calls: Calls, buffers: tuple[Buffer, Buffer], sizes: Splits, total: int, title: str, *, waits: bool
) -> OperationHandle:
    """Send each rank its bytes of one buffer, and put what they send here into another; all ranks know all sizes.

    Args:
        calls: the group's.
        buffers: bytes to send, and memory for those that come.
        sizes: bytes sent to, and received from, each rank.
        total: by what the operation is planned, the same on all ranks: the mean buffer.
        title: says all that the ranks must agree on.
        waits: as of Calls.run.
    """
    request = Request(Collective.ALL_TO_ALL, "uint8", sizes, total)
    return _run(calls, calls.next("all_to_all"), title, request, buffers, waits=waits)


def barrier(calls: Calls, *, waits: bool) -> OperationHandle:
    """Meet all ranks."""
    return calls.post(calls.next("barrier"), "barrier", Work(meets=True, repeated=(None, "sum")), waits=waits)


class AllToAlls:
    """Operations of a group in which no rank knows what the others send to each other."""

    def __init__(self, group: Group) -> None:
        self._calls = group.calls
        self._rows = RowCalls(group.calls)

    def start(
        self, source: Buffer, out: Buffer, rows: tuple[Sequence[int], Sequence[int]], title: str, *, waits: bool
    ) -> Handle:
        """Send each rank its rows of `source`, and put what they send here into `out`.

        Args:
            source: rows of bytes.
            out: rows of bytes.
            rows: how many go to, and come from, each rank.
            title: what all ranks have in common.
            waits: whether the caller waits for the handle next; else the steps that are needed where ranks differ are
                taken by a thread of their own.

        Raises:
            ArgumentError: from the handle, on the rank that expects other rows than are sent to it.
        """
        calls = self._calls
        sent, expected = list(rows[0]), list(rows[1])
        width = source.shape[1]

        def move(received: list[int], total: int, agreed: str) -> Move:
            if received != expected:
                raise ArgumentError(f"rows expected by rank are {expected}, sent are {received}")
            counts = Splits(tuple(each * width for each in sent), tuple(each * width for each in received))
            # The plan must not depend on one rank's splits: every rank prices the job's mean buffer.
            request = Request(Collective.ALL_TO_ALL, "uint8", counts, total * width // len(calls.ranks), agreed=agreed)
            return Move(request=request, buffers=(source, out), result=None)

        call = calls.next("all_to_all")
        with calls.telling(call):
            steps = Rows(title=title, own=sent, column=calls.own, move=move)
            finish = self._rows.start(call, steps, waits=waits)
        return Steps(finish) if waits else in_background(finish, "all_to_all")


class Steps:
    """The handle of an operation of several steps, which the thread that waits for it takes; it waits at once."""

    def __init__(self, finish: Callable[[Callable[[OperationHandle], Any]], Any]) -> None:
        self._finish = finish

    def done(self) -> bool:
        """Return False: nothing is known before the wait."""
        return False

    def wait(self, timeout: float | None = None) -> Any:
        """As of a Handle, but once only."""
        start = time.monotonic()

        def wait_for(step: OperationHandle) -> Any:
            return step.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - start)))

        return self._finish(wait_for)


def _run(
    calls: Calls,
    call: Call,
    title: str,
    request: Request,
    buffers: tuple[Buffer | None, Buffer],
    *,
    waits: bool,
) -> OperationHandle:
    with calls.telling(call):
        return calls.run(call, title, request, buffers, None, waits=waits)
