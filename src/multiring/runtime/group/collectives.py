"""What the ranks of a group do together: collectives, and messages between two of them."""

from collections.abc import Sequence

from multiring.runtime.group.handles import Handle
from multiring.runtime.group.posting import Calls
from multiring.runtime.group.starting import (
    Array,
    chained,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_barrier,
    start_broadcast,
    start_message,
    start_reduce,
    start_reduce_scatter,
)
from multiring.runtime.group.varying_rows import RowCalls


class Collectives:
    """The collectives and messages of a Group.

    Arrays are NumPy's, or speak DLPack or the buffer protocol; they are worked on in place, without a copy, and are the
    operation's until it has ended.

    Every collective raises ArgumentError or UnsupportedError where this rank's arguments are wrong, and then
    MismatchError on the other ranks; MismatchError on all where they differ (inputs intact, the group
    usable); PeerLostError or StallError where a rank is gone or silent (contents undefined, the group
    unusable). `<name>_async` returns a handle at once; its `wait` returns, or raises, the same.

    `label`, of every collective: text that the ranks must agree on besides; MismatchError.titles has it behind
    " labelled ".
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._row_calls = RowCalls(calls)

    def all_reduce(
        self, array: Array, op: str = "sum", *, out: Array | None = None, wire: str | None = None, label: str = ""
    ) -> Array | None:
        """Combine every rank's `array` into all of them, in place; or into `out`, which is returned.

        Args:
            array: any shape, the same on all ranks, as is the order of its strides. With `out` it is only read.
            op: "sum", "average", "min", "max" or "product" (docs/algorithms.md: by type).
            out: where the result goes instead, in memory as `array` is; for arrays that never change.
            wire: "fp16", "bf16" or "int8": how float32 travels between hosts, for a sum or an average; all ranks still
                get the same bits (docs/algorithms.md: what is lost). Within a host nothing is coded.
            label: see the class.
        """
        if out is not None or wire is not None or label or not self._calls.again("all_reduce", array, op):
            return start_all_reduce(self._calls, array, op, out, wire, label, waits=True).wait()
        return None

    def all_reduce_async(
        self,
        array: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        wire: str | None = None,
        label: str = "",
        waits: bool = False,
    ) -> Handle:
        """Start an `all_reduce`; with `waits` this thread waits for the handle at once, and no other need be woken."""
        return start_all_reduce(self._calls, array, op, out, wire, label, waits=waits)

    def broadcast(self, array: Array, root: int = 0, *, out: Array | None = None, label: str = "") -> Array | None:
        """Overwrite every rank's `array` with rank `root`'s, in place; or put that into `out`, which is returned.

        Args:
            array: any shape, the same on all ranks, as is the order of its strides. With `out` it is only read.
            root: a rank of the group.
            out: as for all_reduce.
            label: see the class.
        """
        return start_broadcast(self._calls, array, root, out, label, waits=True).wait()

    def broadcast_async(self, array: Array, root: int = 0, *, out: Array | None = None, label: str = "") -> Handle:
        """Start a `broadcast`."""
        return start_broadcast(self._calls, array, root, out, label, waits=False)

    def reduce(self, array: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        """Combine every rank's `array` into rank `root`'s, in place; those of the others are only read.

        Args:
            array: any shape, the same on all ranks, as is the order of its strides.
            root: a rank of the group.
            op: as for all_reduce.
            label: see the class.
        """
        start_reduce(self._calls, array, root, op, label, waits=True).wait()

    def reduce_async(self, array: Array, root: int = 0, op: str = "sum", *, label: str = "") -> Handle:
        """Start a `reduce`."""
        return start_reduce(self._calls, array, root, op, label, waits=False)

    def reduce_scatter(self, array: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Array:
        """Combine every rank's `array` and return this rank's part of the rows; `array` stays as it is.

        Args:
            array: shape (n, ...), the same on all ranks, row-major. Rank r gets n // size rows, and one more where
                r < n % size.
            out: where to put them, row-major; a new array in the arena by default.
            op: as for all_reduce.
            label: see the class.
        """
        return start_reduce_scatter(self._calls, array, out, op, label, waits=True).wait()

    def reduce_scatter_async(
        self, array: Array, out: Array | None = None, op: str = "sum", *, label: str = ""
    ) -> Handle:
        """Start a `reduce_scatter`."""
        return start_reduce_scatter(self._calls, array, out, op, label, waits=False)

    def all_gather(self, array: Array, out: Array | None = None, *, label: str = "", with_rows: bool = False) -> Array:
        """Return every rank's `array`, one after the other along the first dimension.

        Args:
            array: shape (n_r, ...), row-major; the ranks may differ in n_r only.
            out: shape (sum of n_r, ...), row-major; a new array in the arena by default. It may hold `array` as this
                rank's own part, which then is not copied.
            with_rows: whether to return (array, rows), how many rows came from each rank, in place of the array.
            label: see the class.
        """
        return start_all_gather(self._row_calls, array, out, label, with_rows=with_rows, waits=True)()

    def all_gather_async(
        self,
        array: Array,
        out: Array | None = None,
        *,
        label: str = "",
        with_rows: bool = False,
        waits: bool = False,
    ) -> Handle:
        """Start an `all_gather`; with `waits` the caller waits for the handle at once, and needs no thread for that."""
        start = start_all_gather(self._row_calls, array, out, label, with_rows=with_rows, waits=False)
        return chained("all_gather", start, waits=waits)

    def all_to_all(
        self,
        array: Array,
        out: Array | None = None,
        splits: Sequence[int] | None = None,
        *,
        label: str = "",
        with_rows: bool = False,
    ) -> Array:
        """Send each rank its rows of `array`, and return the rows they all sent here, by sender.

        Args:
            array: shape (n, ...), row-major.
            out: shape (rows received, ...), row-major; a new array in the arena by default.
            splits: how many rows go to each rank; without it n must be a multiple of the group's size.
            with_rows: as for all_gather.
            label: see the class.
        """
        return start_all_to_all(self._row_calls, array, out, splits, label, with_rows=with_rows, waits=True)()

    def all_to_all_async(
        self,
        array: Array,
        out: Array | None = None,
        splits: Sequence[int] | None = None,
        *,
        label: str = "",
        with_rows: bool = False,
        waits: bool = False,
    ) -> Handle:
        """Start an `all_to_all`; `waits` as for all_gather_async."""
        start = start_all_to_all(self._row_calls, array, out, splits, label, with_rows=with_rows, waits=False)
        return chained("all_to_all", start, waits=waits)

    def barrier(self, *, label: str = "") -> None:
        """Return once every rank has called it."""
        if label or not self._calls.again("barrier"):
            start_barrier(self._calls, label, waits=True).wait()

    def barrier_async(self, *, label: str = "") -> Handle:
        """Start a `barrier`."""
        return start_barrier(self._calls, label, waits=False)

    # ---- messages ----

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send `array` to rank `to`, which must `recv` an array of the same shape and type under the same tag.

        Returns once the array may be changed. Messages between two ranks under one tag arrive in order.
        """
        start_message(self._calls, "send", array, to, tag, waits=True).wait()

    def send_async(self, array: Array, to: int, tag: int = 0) -> Handle:
        """Start a `send`."""
        return start_message(self._calls, "send", array, to, tag, waits=False)

    def recv(self, array: Array, source: int, tag: int = 0) -> None:
        """Overwrite `array` with what rank `source` sends here under `tag`."""
        start_message(self._calls, "recv", array, source, tag, waits=True).wait()

    def recv_async(self, array: Array, source: int, tag: int = 0) -> Handle:
        """Start a `recv`."""
        return start_message(self._calls, "recv", array, source, tag, waits=False)
