"""Collectives whose ranks may contribute different numbers of rows.

A rank must know every rank's number of rows before it can lay out the result. A count of the rows would cost an extra
operation each time, although the numbers rarely differ. So each rank first starts the collective itself, under the
assumption that all ranks have as many rows as this rank. The assumed number is part of the ranks' agreement. If the
numbers differ, every rank gets a mismatch with its inputs intact; then the ranks count their rows and start the
collective again. The title contains only properties that are equal on all ranks: equal titles mean the same collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring._runtime.arrays import Buffer, buffer_of
from multiring._runtime.group.compile import Request
from multiring._runtime.group.handles import AgreedHandle
from multiring._runtime.group.posting import Call, Calls
from multiring._schedule import Collective
from multiring.errors import ArgumentError, MismatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCollective:
    """A collective for which every rank's number of rows is known or assumed."""

    request: Request
    buffers: tuple[Buffer, Buffer]  # input, output
    result: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """This rank's contribution to a collective with varying rows."""

    title: str  # the properties in which all ranks must agree
    own: list[int]  # this rank's numbers: the rows of its array, or the rows it sends to each rank
    column: int  # the index of the number in `own` that this rank needs from each rank
    # Makes the RowCollective. The arguments are the numbers in the column, the sum of the numbers of all ranks, and a
    # text on which the ranks must also agree. The function raises ArgumentError if the caller's `out` does not fit.
    move: Callable[[list[int], int, str], RowCollective]


class RowCalls:
    """The collectives of one group in which ranks may have different numbers of rows."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        # The titles with different numbers in the last call: counting at once is cheaper for them. Ranks may remember
        # different titles. If one rank counts while another one assumes, all ranks get a mismatch, and then all count.
        self._uneven: set[str] = set()

    def start(self, call: Call, rows: Rows, *, waits: bool) -> Callable[..., Any]:
        """Start the collective; return a function that finishes it.

        The returned function waits, runs further steps if they are needed, and returns or raises like `Handle.wait`.
        Its optional argument is a function that waits for the handle of one step.
        """
        assumed = self._assumed(rows)
        if assumed is None:
            pending = [self._count(call.step(0, "counts"), rows, waits=waits)]
        else:
            pending = [self._run(call, rows, assumed, waits=waits)]
        is_assumed = assumed is not None

        def finish(wait: Callable[[AgreedHandle], Any] = _wait) -> Any:
            step, first = 0, pending.pop()
            try:
                found = wait(first)
            except MismatchError:
                if any(title != call.titled(rows.title) for title in first.titles.values()):
                    raise
                step = 1
            else:
                if is_assumed:
                    return found
            del first  # this frees the memory that was allocated under the assumption
            if step == 1:
                with self.calls.telling(counting := call.step(step, "counts")):
                    again = self._count(counting, rows, waits=True)
                found = wait(again)
            table = found.reshape(-1, len(rows.own))
            (self._uneven.discard if (table == table[0, 0]).all() else self._uneven.add)(rows.title)
            with self.calls.telling(moving := call.step(step + 1, call.name)):
                move = rows.move(table[:, rows.column].tolist(), int(table.sum()), "")
                handle = self._run(moving, rows, move, waits=True)
            return wait(handle)

        return finish

    def _assumed(self, rows: Rows) -> RowCollective | None:
        """Return the collective for equal numbers on all ranks.

        The result is None if the numbers are likely to differ.
        """
        each = rows.own[0]
        if rows.title in self._uneven or any(other != each for other in rows.own):
            return None
        ranks = len(self.calls.ranks)
        try:
            return rows.move([each] * ranks, each * len(rows.own) * ranks, f"{each} rows")
        except ArgumentError:  # `out` may still fit the other ranks' rows; after the count a wrong `out` is an error
            return None

    def _run(self, call: Call, rows: Rows, move: RowCollective, *, waits: bool) -> AgreedHandle:
        return self.calls.run(call, rows.title, move.request, move.buffers, move.result, waits=waits)

    def _count(self, call: Call, rows: Rows, *, waits: bool) -> AgreedHandle:
        """Gather every rank's numbers of rows."""
        own = np.asarray(rows.own, np.int64)
        table = np.empty(len(own) * len(self.calls.ranks), np.int64)
        counts = (len(own),) * len(self.calls.ranks)
        request = Request(Collective.ALL_GATHER, "int64", counts, len(table), agreed="counts")
        buffers = buffer_of(own, writes=False), buffer_of(table, writes=True)
        return Calls.run(self.calls, call, rows.title, request, buffers, table, waits=waits)  # counts in host memory


def _wait(handle: AgreedHandle) -> Any:
    return handle.wait()
