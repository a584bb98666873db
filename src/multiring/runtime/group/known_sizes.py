"""Collectives on memory that is laid out already: every rank knows how much each of them brings, nothing is counted.

`Group.all_gather` and `all_to_all` take arrays whose ranks may differ in rows. Here the caller knows what every rank
brings, so that one operation does; its title has the sizes for the ranks to agree on.
"""

from collections.abc import Sequence

from multiring.errors import ArgumentError
from multiring.runtime.arrays import Buffer
from multiring.runtime.group.compile import Request
from multiring.runtime.group.handles import AgreedHandle, Handle, TimedSteps, in_background
from multiring.runtime.group.posting import Calls
from multiring.runtime.group.varying_rows import Move, RowCalls, Rows
from multiring.schedule import Collective, Splits


class KnownSizes:
    """Those of one group. Buffers are flat, `title` says all that ranks agree on, `waits` is as of `Calls.post`."""

    def __init__(self, calls: Calls, row_calls: RowCalls) -> None:
        self._calls = calls
        self._row_calls = row_calls

    def all_reduce(self, buffer: Buffer, op: str, title: str, *, waits: bool) -> AgreedHandle:
        """Combine every rank's `buffer` into all of them."""
        count = buffer.shape[0]
        request = Request(Collective.ALL_REDUCE, buffer.dtype, count, count, op)
        return self._run(title, request, (None, buffer), waits=waits)

    def broadcast(self, memory: Buffer, root: int, title: str, *, waits: bool) -> AgreedHandle:
        """Overwrite every rank's bytes with rank `root`'s."""
        count = memory.shape[0]
        request = Request(Collective.BROADCAST, memory.dtype, count, count, root=root)
        return self._run(title, request, (None, memory), waits=waits)

    def all_gather(self, own: Buffer, out: Buffer, sizes: tuple[int, ...], title: str, *, waits: bool) -> AgreedHandle:
        """Fill the bytes of `out` with every rank's `own`, of as many as `sizes` says; it may lie in its place."""
        request = Request(Collective.ALL_GATHER, "uint8", sizes, out.shape[0])
        return self._run(title, request, (own, out), waits=waits)

    def reduce_scatter(
        self, buffers: tuple[Buffer, Buffer], counts: tuple[int, ...], op: str, title: str, *, waits: bool
    ) -> AgreedHandle:
        """Combine every rank's first buffer and put this rank's part, of `counts` elements by rank, into the second."""
        source = buffers[0]
        request = Request(Collective.REDUCE_SCATTER, source.dtype, counts, source.shape[0], op)
        return self._run(title, request, buffers, waits=waits)

    def all_to_all(
        self, buffers: tuple[Buffer, Buffer], sizes: Splits, total: int, title: str, *, waits: bool
    ) -> AgreedHandle:
        """Send each rank its bytes of one buffer, and put what they send here into another.

        Args:
            buffers: bytes to send, and memory for those that come.
            sizes: bytes sent to, and received from, each rank.
            total: by what the operation is planned, the same on all ranks: the mean buffer.
            title: see the class.
            waits: see the class.
        """
        request = Request(Collective.ALL_TO_ALL, "uint8", sizes, total)
        return self._run(title, request, buffers, waits=waits)

    def all_to_all_rows(
        self, source: Buffer, out: Buffer, rows: tuple[Sequence[int], Sequence[int]], title: str, *, waits: bool
    ) -> Handle:
        """Send each rank its rows of `source`, and put what they send here into `out`; others' sizes nobody knows.

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
            finish = self._row_calls.start(call, steps, waits=waits)
        return TimedSteps(finish) if waits else in_background(finish, "all_to_all")

    def _run(self, title: str, request: Request, buffers: tuple[Buffer | None, Buffer], *, waits: bool) -> AgreedHandle:
        call = self._calls.next(request.collective.value)
        with self._calls.telling(call):
            return self._calls.run(call, title, request, buffers, None, waits=waits)
