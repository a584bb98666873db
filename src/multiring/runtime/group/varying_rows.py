"""Rows: collectives whose ranks may differ in how many rows they bring.

Each rank must know how many before it can lay out what it receives; to ask would cost an operation each time, though
ranks rarely differ. So they start with the operation itself, as if all ranks brought what this one does, and what they
assume is part of what is agreed on. Where they differ, every rank sees a mismatch, inputs intact; then they count, and
move. All that may differ stays out of the title: ranks of one title mean the same collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.errors import ArgumentError, MismatchError
from multiring.runtime.arrays import Buffer, buffer_of
from multiring.runtime.group.compile import Request
from multiring.runtime.group.handles import AgreedHandle
from multiring.runtime.group.posting import Call, Calls
from multiring.schedule import Collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The collective itself, once it is known what each rank brings."""

    request: Request
    buffers: tuple[Buffer, Buffer]  # input, output
    result: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What this rank brings to one such collective."""

    title: str  # all that the ranks must have in common
    own: list[int]  # rows: of the array, or to each rank
    column: int  # which of every rank's numbers this rank has to know
    # Of the numbers in the column, of the sum of all ranks' numbers, and of what the ranks have to agree on besides;
    # raises ArgumentError where the caller's `out` does not fit.
    move: Callable[[list[int], int, str], Move]


class RowCalls:
    """The collectives of one group whose ranks may differ in rows."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        # Titles whose ranks differed the last time: it is cheaper to count at once. What a rank remembers need not be
        # what the others do: whoever counts differs from whoever assumes, and then all count.
        self._uneven: set[str] = set()

    def start(self, call: Call, rows: Rows, *, waits: bool) -> Callable[..., Any]:
        """Start the collective; return what waits for it, does the rest, and returns or raises as `Handle.wait`.

        It may be given how to wait for the handle of each step.
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
            del first  # and with it the memory for what was assumed
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

    def _assumed(self, rows: Rows) -> Move | None:
        """Return what happens if all ranks bring what this one does; None if that is not to be expected."""
        each = rows.own[0]
        if rows.title in self._uneven or any(other != each for other in rows.own):
            return None
        ranks = len(self.calls.ranks)
        try:
            return rows.move([each] * ranks, each * len(rows.own) * ranks, f"{each} rows")
        except ArgumentError:  # `out` may be right for what the others bring; if not, it is said once that is known
            return None

    def _run(self, call: Call, rows: Rows, move: Move, *, waits: bool) -> AgreedHandle:
        return self.calls.run(call, rows.title, move.request, move.buffers, move.result, waits=waits)

    def _count(self, call: Call, rows: Rows, *, waits: bool) -> AgreedHandle:
        """Gather what every rank brings."""
        own = np.asarray(rows.own, np.int64)
        table = np.empty(len(own) * len(self.calls.ranks), np.int64)
        counts = (len(own),) * len(self.calls.ranks)
        request = Request(Collective.ALL_GATHER, "int64", counts, len(table), agreed="counts")
        buffers = buffer_of(own, writes=False), buffer_of(table, writes=True)
        return Calls.run(self.calls, call, rows.title, request, buffers, table, waits=waits)  # in host memory


def _wait(handle: AgreedHandle) -> Any:
    return handle.wait()
