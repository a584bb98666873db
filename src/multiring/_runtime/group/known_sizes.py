"""Collectives for callers that know every rank's sizes.

With known sizes the ranks need not count rows. `Group.all_gather` and `all_to_all` accept arrays with different numbers
of rows on each rank, and may need several operations. In this module the caller knows the sizes and lays out the
memory, so one operation is enough. The sizes are part of the operation's title, on which the ranks agree.
"""

from collections.abc import Sequence

from multiring._runtime.arrays import Buffer
from multiring._runtime.group.compile import Request
from multiring._runtime.group.handles import AgreedHandle, Handle, TimedSteps, in_background
from multiring._runtime.group.posting import Calls
from multiring._runtime.group.varying_rows import RowCalls, RowCollective, Rows
from multiring._schedule import Collective, Splits
from multiring.errors import ArgumentError


class KnownSizes:
    """The known-size collectives of one group.

    Buffers are flat. `title` contains everything the ranks must agree on. `label` names the operation in timelines and
    errors. `waits` is as for `Calls.post`.
    """

    def __init__(self, calls: Calls, row_calls: RowCalls) -> None:
        self._calls = calls
        self._row_calls = row_calls

    def all_reduce(self, buffer: Buffer, op: str, title: str, *, waits: bool) -> AgreedHandle:
        """Reduce every rank's `buffer` and store the result in all of them."""
        count = buffer.shape[0]
        request = Request(Collective.ALL_REDUCE, buffer.dtype, count, count, op)
        return self._run(title, request, (None, buffer), waits=waits)

    def broadcast(self, memory: Buffer, root: int, title: str, *, waits: bool) -> AgreedHandle:
        """Copy rank `root`'s bytes into every rank's memory."""
        count = memory.shape[0]
        request = Request(Collective.BROADCAST, memory.dtype, count, count, root=root)
        return self._run(title, request, (None, memory), waits=waits)

    def all_gather(
        self, own: Buffer, out: Buffer, sizes: tuple[int, ...], title: str, *, waits: bool, label: str = ""
    ) -> AgreedHandle:
        """Concatenate every rank's `own` in `out`.

        `sizes` lists the bytes of each rank. `own` may be this rank's part of `out`.
        """
        request = Request(Collective.ALL_GATHER, "uint8", sizes, out.shape[0])
        return self._run(title, request, (own, out), waits=waits, label=label)

    def reduce_scatter(
        self,
        buffers: tuple[Buffer, Buffer],
        counts: tuple[int, ...],
        op: str,
        title: str,
        *,
        waits: bool,
        label: str = "",
    ) -> AgreedHandle:
        """Reduce every rank's first buffer; store this rank's part in the second.

        `counts` gives the elements of each rank's part.
        """
        source = buffers[0]
        request = Request(Collective.REDUCE_SCATTER, source.dtype, counts, source.shape[0], op)
        return self._run(title, request, buffers, waits=waits, label=label)

    def all_to_all(
        self, buffers: tuple[Buffer, Buffer], sizes: Splits, total: int, title: str, *, waits: bool
    ) -> AgreedHandle:
        """Send each rank its part of the first buffer; receive into the second.

        Args:
            buffers: the bytes to send, and the memory for the bytes to receive.
            sizes: the number of bytes sent to each rank, and received from each rank.
            total: the mean size of the ranks' buffers in bytes, the same on all ranks; the plan depends on it.
            title: see the class.
            waits: see the class.
        """
        request = Request(Collective.ALL_TO_ALL, "uint8", sizes, total)
        return self._run(title, request, buffers, waits=waits)

    def all_to_all_rows(
        self, source: Buffer, out: Buffer, rows: tuple[Sequence[int], Sequence[int]], title: str, *, waits: bool
    ) -> Handle:
        """Send each rank its rows of `source`; receive the other ranks' rows into `out`.

        A rank knows its own numbers of rows only, not the numbers between two other ranks.

        Args:
            source: the rows to send, as bytes.
            out: memory for the rows to receive, as bytes.
            rows: the numbers of rows sent to each rank, and expected from each rank.
            title: the properties in which all ranks must agree.
            waits: whether the caller waits for the handle next. Otherwise a background thread takes the extra steps
                that are needed if the numbers differ between ranks.

        Raises:
            ArgumentError: from the handle's `wait`, this rank expects other numbers of rows than the other ranks send.
        """
        calls = self._calls
        sent, expected = list(rows[0]), list(rows[1])
        width = source.shape[1]

        def move(received: list[int], total: int, agreed: str) -> RowCollective:
            if received != expected:
                raise ArgumentError(f"this rank expects {expected} rows by sender, but the ranks send {received}")
            counts = Splits(tuple(each * width for each in sent), tuple(each * width for each in received))
            # The plan must not depend on one rank's splits, so every rank prices the job's mean buffer.
            request = Request(Collective.ALL_TO_ALL, "uint8", counts, total * width // len(calls.ranks), agreed=agreed)
            return RowCollective(request=request, buffers=(source, out), result=None)

        call = calls.next("all_to_all")
        with calls.telling(call):
            steps = Rows(title=title, own=sent, column=calls.own, move=move)
            finish = self._row_calls.start(call, steps, waits=waits)
        return TimedSteps(finish) if waits else in_background(finish, "all_to_all")

    def _run(
        self, title: str, request: Request, buffers: tuple[Buffer | None, Buffer], *, waits: bool, label: str = ""
    ) -> AgreedHandle:
        call = self._calls.next(request.collective.value, label)
        with self._calls.telling(call):
            return self._calls.run(call, title, request, buffers, None, waits=waits)
