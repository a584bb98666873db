"""The operations of a group: collectives, and messages between two of its ranks."""

from collections.abc import Sequence

from multiring._runtime.group.handles import Handle
from multiring._runtime.group.posting import Calls
from multiring._runtime.group.starting import (
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
from multiring._runtime.group.varying_rows import RowCalls


class Collectives:
    """The collectives and messages of a Group.

    Arrays are NumPy arrays or objects that support DLPack or the buffer protocol. Operations work on their memory in
    place, without a copy. The caller must not use an array before its operation has ended.

    All collectives raise the same errors:

    - ArgumentError or UnsupportedError if this rank's arguments are wrong; the other ranks raise MismatchError.
    - MismatchError on all ranks if their calls differ. The inputs are intact, and the group stays usable.
    - PeerLostError or StallError if a rank has died, left or become silent. The contents of the arrays are undefined,
      and the group is unusable.

    `<name>_async` returns a handle at once; the handle's `wait` returns the same result or raises the same error.

    Every collective takes a `label`: a text on which the ranks must also agree. It appears in MismatchError.titles
    after " labelled ".
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._row_calls = RowCalls(calls)

    def all_reduce(
        self, array: Array, op: str = "sum", *, out: Array | None = None, wire: str | None = None, label: str = ""
    ) -> Array | None:
        """Reduce every rank's `array` element by element; all ranks get the result.

        The result replaces the contents of `array`, unless `out` is given.

        Args:
            array: any shape; shape and order of strides must be the same on all ranks. With `out` it is only read.
            op: "sum", "average", "min", "max" or "product"; docs/algorithms.md lists them by element type.
            out: an array of the same shape, type and order of strides that receives the result instead of `array`, for
                immutable arrays. It is then the return value.
            wire: a wire type such as "bf16", which encodes float32 data that travels between hosts, for a sum or an
                average. All ranks still get identical bits. docs/algorithms.md gives the types and their loss. Traffic
                within a host is not encoded.
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
        """Start an `all_reduce` and return its handle.

        `waits=True` promises that this thread waits for the handle next, which saves waking another thread.
        """
        return start_all_reduce(self._calls, array, op, out, wire, label, waits=waits)

    def broadcast(self, array: Array, root: int = 0, *, out: Array | None = None, label: str = "") -> Array | None:
        """Copy rank `root`'s `array` into every rank's `array`.

        With `out`, the copy goes to `out`, which is then returned.

        Args:
            array: any shape; shape and order of strides must be the same on all ranks. With `out` it is only read.
            root: a rank of the group.
            out: as for all_reduce.
            label: see the class.
        """
        return start_broadcast(self._calls, array, root, out, label, waits=True).wait()

    def broadcast_async(self, array: Array, root: int = 0, *, out: Array | None = None, label: str = "") -> Handle:
        """Start a `broadcast` and return its handle."""
        return start_broadcast(self._calls, array, root, out, label, waits=False)

    def reduce(self, array: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        """Reduce every rank's `array`, and store the result in rank `root`'s `array`.

        The arrays of the other ranks are only read.

        Args:
            array: any shape; shape and order of strides must be the same on all ranks.
            root: a rank of the group.
            op: as for all_reduce.
            label: see the class.
        """
        start_reduce(self._calls, array, root, op, label, waits=True).wait()

    def reduce_async(self, array: Array, root: int = 0, op: str = "sum", *, label: str = "") -> Handle:
        """Start a `reduce` and return its handle."""
        return start_reduce(self._calls, array, root, op, label, waits=False)

    def reduce_scatter(self, array: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Array:
        """Reduce every rank's `array` and return this rank's rows of the result.

        `array` is only read.

        Args:
            array: shape (n, ...), the same on all ranks, row-major. Rank r gets n // size rows, and one more if
                r < n % size.
            out: a row-major array for the result. By default the result is a new array in shared memory.
            op: as for all_reduce.
            label: see the class.
        """
        return start_reduce_scatter(self._calls, array, out, op, label, waits=True).wait()

    def reduce_scatter_async(
        self, array: Array, out: Array | None = None, op: str = "sum", *, label: str = ""
    ) -> Handle:
        """Start a `reduce_scatter` and return its handle."""
        return start_reduce_scatter(self._calls, array, out, op, label, waits=False)

    def all_gather(self, array: Array, out: Array | None = None, *, label: str = "", with_rows: bool = False) -> Array:
        """Return the arrays of all ranks, concatenated along the first dimension.

        Args:
            array: shape (n_r, ...), row-major; the ranks may differ in n_r only.
            out: shape (sum of n_r, ...), row-major. By default the result is a new array in shared memory. `array` may
                be this rank's own part of `out`; then it is not copied.
            with_rows: whether to return the pair (array, rows), where `rows` lists the number of rows of each rank.
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
        """Start an `all_gather` and return its handle.

        `waits=True` promises that the caller waits for the handle next, so that no background thread is needed.
        """
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
        """Send rows of `array` to each rank; return the received rows, by sender.

        Args:
            array: shape (n, ...), row-major.
            out: shape (rows received, ...), row-major. By default the result is a new array in shared memory.
            splits: the number of rows to send to each rank. By default all ranks get equally many rows, and n must be a
                multiple of the group's size.
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
        """Start an `all_to_all` and return its handle; `waits` is as for all_gather_async."""
        start = start_all_to_all(self._row_calls, array, out, splits, label, with_rows=with_rows, waits=False)
        return chained("all_to_all", start, waits=waits)

    def barrier(self, *, label: str = "") -> None:
        """Wait until every rank of the group has called `barrier`."""
        if label or not self._calls.again("barrier"):
            start_barrier(self._calls, label, waits=True).wait()

    def barrier_async(self, *, label: str = "") -> Handle:
        """Start a `barrier` and return its handle."""
        return start_barrier(self._calls, label, waits=False)

    # ---- messages ----

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send `array` to rank `to`.

        That rank must `recv` an array of the same shape and type under the same tag. The call returns once the array
        may be changed. Messages between two ranks with the same tag arrive in order.
        """
        start_message(self._calls, "send", array, to, tag, waits=True).wait()

    def send_async(self, array: Array, to: int, tag: int = 0) -> Handle:
        """Start a `send` and return its handle."""
        return start_message(self._calls, "send", array, to, tag, waits=False)

    def recv(self, array: Array, source: int, tag: int = 0) -> None:
        """Receive the next message of rank `source` with tag `tag` into `array`."""
        start_message(self._calls, "recv", array, source, tag, waits=True).wait()

    def recv_async(self, array: Array, source: int, tag: int = 0) -> Handle:
        """Start a `recv` and return its handle."""
        return start_message(self._calls, "recv", array, source, tag, waits=False)
