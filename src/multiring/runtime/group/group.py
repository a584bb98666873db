"""Group: the ranks that do collectives together, and the collectives."""

import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from multiring.errors import ArgumentError
from multiring.planner import Plan, Task
from multiring.runtime.arrays import Buffer, buffer_of, copied, numpy_dtype
from multiring.runtime.group.compile import Request
from multiring.runtime.group.handles import Handle, SteppedHandle, in_background
from multiring.runtime.group.posting import Calls, ProcessServices, Work
from multiring.runtime.group.varying_rows import Move, RowCalls, Rows
from multiring.schedule import Collective, Splits, wire_of
from multiring.topology import Topology

if TYPE_CHECKING:
    import numpy as np

Array = Any  # NumPy, DLPack or buffer protocol; see runtime/arrays.py


class Group:
    """Ranks that do collectives together; every one of them calls the same operations in the same order.

    Ranks of a group are numbered from 0; `ranks` gives their ranks in the world. Arrays are NumPy's, or
    speak DLPack or the buffer protocol; they are worked on in place, without a copy, and are the
    operation's until it has ended. Operations of one group start in the order of the calls; different
    groups do not wait for each other.

    Every collective raises ArgumentError or UnsupportedError where this rank's arguments are wrong, and then
    MismatchError on the other ranks; MismatchError on all where they differ (inputs intact, the group
    usable); PeerLostError or StallError where a rank is gone or silent (contents undefined, the group
    unusable). `<name>_async` returns a handle at once; its `wait` returns, or raises, the same.

    `label`, of every collective: text that the ranks must agree on besides; MismatchError.titles has it behind
    " labelled ".
    """

    def __init__(self, services: ProcessServices, ranks: tuple[int, ...], topology: Topology, key: bytes) -> None:
        self._calls = Calls(services, ranks, topology, key)
        self._by_rows = RowCalls(self._calls)
        self._ranks = ranks
        self._own = self._calls.own
        self._topology = topology
        self._twins: dict[str, Group] = {}
        self._twins_lock = threading.Lock()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._own

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world rank of each rank of the group."""
        return self._ranks

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid the topology lays the ranks on, fastest links first."""
        return self._calls.grid

    @property
    def topology(self) -> Topology:
        """Where the ranks are, and what the links between them cost, as the planner sees it."""
        return self._topology

    @property
    def calls(self) -> Calls:
        """What the group's operations have in common; for what is built on groups."""
        return self._calls

    @property
    def plans(self) -> dict[Task, Plan]:
        """What this group has planned so far, and how; `multiring.planner.pins_text` makes a plan file of them."""
        return self._calls.plans

    def plan_of(self, collective: str, elements: int, dtype: Any = "float32", op: str = "sum", root: int = 0) -> Plan:
        """Return the plan by which `collective` runs on so many elements: those of the longer side, all ranks' blocks.

        Local: every rank comes to the same plan, and keeps it.

        Raises:
            ArgumentError: there is no such collective, type or operation.
        """
        known = {each.value: each for each in Collective}
        if collective not in known:
            raise ArgumentError(f"collective={collective!r}: want one of {', '.join(known)}")
        count = _number("elements", elements, 0)
        request = Request(known[collective], numpy_dtype(dtype).name, count, count, op, self._rank_of("root", root))
        return self._calls.plan_of(request)

    def pin(self, task: Task, plan: Plan) -> None:
        """Run `plan` for `task` from now on. Local: every rank pins the same between the same two operations.

        Raises:
            ScheduleError: the plan's schedule does not do what it promises.
        """
        self._calls.use(task, plan)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, ranks={self._ranks})"

    # ---- memory ----

    def allocate(self, shape: int | Sequence[int], dtype: Any) -> "np.ndarray[Any, Any]":
        """Return an array in the arena, which the ranks of this host read in place. Its contents are undefined.

        Local: no other rank takes part. The memory is given back with the last array that views it,
        also after `shutdown`.

        Raises:
            ArgumentError: a negative dimension, an unknown type, or the rank's segment is full.
        """
        dims = tuple(_number("shape", dim, 0) for dim in (shape if isinstance(shape, Iterable) else (shape,)))
        kind = numpy_dtype(dtype)
        size = math.prod(dims) * kind.itemsize
        return self._calls.services.context.allocate(size)[:size].view(kind).reshape(dims)

    # ---- collectives ----

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
            return self._start_all_reduce(array, op, out, wire, label, waits=True).wait()
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
        return self._start_all_reduce(array, op, out, wire, label, waits=waits)

    def _start_all_reduce(
        self, array: Array, op: str, out: Array | None, wire: str | None, label: str, *, waits: bool
    ) -> Handle:
        call = self._calls.next("all_reduce", label)
        with self._calls.telling(call):
            buffer = buffer_of(array, writes=True) if out is None else copied(array, out)
            count, coded = buffer.count, wire_of(wire)
            request = Request(Collective.ALL_REDUCE, buffer.dtype, count, count, op, wire=coded)
            title = f"all_reduce {op} {_shown(buffer)}{f', wire {wire}' if coded else ''}"
            return self._calls.run(call, title, request, (None, buffer), out, waits=waits)

    def broadcast(self, array: Array, root: int = 0, *, out: Array | None = None, label: str = "") -> Array | None:
        """Overwrite every rank's `array` with rank `root`'s, in place; or put that into `out`, which is returned.

        Args:
            array: any shape, the same on all ranks, as is the order of its strides. With `out` it is only read.
            root: a rank of the group.
            out: as for all_reduce.
            label: see the class.
        """
        return self._start_broadcast(array, root, out, label, waits=True).wait()

    def broadcast_async(self, array: Array, root: int = 0, *, out: Array | None = None, label: str = "") -> Handle:
        """Start a `broadcast`."""
        return self._start_broadcast(array, root, out, label, waits=False)

    def _start_broadcast(self, array: Array, root: int, out: Array | None, label: str, *, waits: bool) -> Handle:
        call = self._calls.next("broadcast", label)
        with self._calls.telling(call):
            root = self._rank_of("root", root)
            if out is None:
                buffer = buffer_of(array, writes=self._own != root)
            else:
                buffer = copied(array, out, copies=self._own == root)
            request = Request(Collective.BROADCAST, buffer.dtype, buffer.count, buffer.count, root=root)
            title = f"broadcast from rank {root} {_shown(buffer)}"
            return self._calls.run(call, title, request, (None, buffer), out, waits=waits)

    def reduce_scatter(self, array: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Array:
        """Combine every rank's `array` and return this rank's part of the rows; `array` stays as it is.

        Args:
            array: shape (n, ...), the same on all ranks, row-major. Rank r gets n // size rows, and one more where
                r < n % size.
            out: where to put them, row-major; a new array in the arena by default.
            op: as for all_reduce.
            label: see the class.
        """
        return self._start_reduce_scatter(array, out, op, label, waits=True).wait()

    def reduce_scatter_async(
        self, array: Array, out: Array | None = None, op: str = "sum", *, label: str = ""
    ) -> Handle:
        """Start a `reduce_scatter`."""
        return self._start_reduce_scatter(array, out, op, label, waits=False)

    def _start_reduce_scatter(self, array: Array, out: Array | None, op: str, label: str, *, waits: bool) -> Handle:
        call = self._calls.next("reduce_scatter", label)
        with self._calls.telling(call):
            buffer = _rows(buffer_of(array, writes=False))
            rows = [buffer.shape[0] // self.size + (r < buffer.shape[0] % self.size) for r in range(self.size)]
            width = math.prod(buffer.shape[1:])
            out, output = self._out(out, (rows[self._own], *buffer.shape[1:]), buffer)
            counts = tuple(each * width for each in rows)
            request = Request(Collective.REDUCE_SCATTER, buffer.dtype, counts, buffer.count, op)
            title = f"reduce_scatter {op} {_shown(buffer)}"
            return self._calls.run(call, title, request, (buffer, output), out, waits=waits)

    def all_gather(self, array: Array, out: Array | None = None, *, label: str = "", with_rows: bool = False) -> Array:
        """Return every rank's `array`, one after the other along the first dimension.

        Args:
            array: shape (n_r, ...), row-major; the ranks may differ in n_r only.
            out: shape (sum of n_r, ...), row-major; a new array in the arena by default. It may hold `array` as this
                rank's own part, which then is not copied.
            with_rows: whether to return (array, rows), how many rows came from each rank, in place of the array.
            label: see the class.
        """
        return self._start_all_gather(array, out, label, with_rows=with_rows, waits=True)()

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
        start = self._start_all_gather(array, out, label, with_rows=with_rows, waits=False)
        return self._chain("all_gather", start, waits=waits)

    def _start_all_gather(
        self, array: Array, out: Array | None, label: str, *, with_rows: bool, waits: bool
    ) -> Callable[[], Array]:
        call = self._calls.next("all_gather", label)
        with self._calls.telling(call):
            buffer = _rows(buffer_of(array, writes=False))

            def move(rows: list[int], total: int, agreed: str) -> Move:
                start = sum(rows[: self._own])
                whole, output = self._out(out, (total, *buffer.shape[1:]), buffer, own_row=start)
                width = math.prod(buffer.shape[1:])
                counts = tuple([each * width for each in rows])
                request = Request(Collective.ALL_GATHER, buffer.dtype, counts, total * width, agreed=agreed)
                return Move(request=request, buffers=(buffer, output), result=(whole, rows) if with_rows else whole)

            title = f"all_gather of {_shown_rows(buffer)}"
            return self._by_rows.start(call, Rows(title=title, own=[buffer.shape[0]], column=0, move=move), waits=waits)

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
        return self._start_all_to_all(array, out, splits, label, with_rows=with_rows, waits=True)()

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
        start = self._start_all_to_all(array, out, splits, label, with_rows=with_rows, waits=False)
        return self._chain("all_to_all", start, waits=waits)

    def _start_all_to_all(
        self,
        array: Array,
        out: Array | None,
        splits: Sequence[int] | None,
        label: str,
        *,
        with_rows: bool,
        waits: bool,
    ) -> Callable[[], Array]:
        call = self._calls.next("all_to_all", label)
        with self._calls.telling(call):
            buffer = _rows(buffer_of(array, writes=False))
            sent = self._splits(buffer, splits)

            def move(received: list[int], total: int, agreed: str) -> Move:
                width = math.prod(buffer.shape[1:])
                whole, output = self._out(out, (sum(received), *buffer.shape[1:]), buffer)
                counts = Splits(tuple(rows * width for rows in sent), tuple(rows * width for rows in received))
                # The plan must not depend on one rank's splits: every rank prices the job's mean buffer.
                mean = total * width // self.size
                request = Request(Collective.ALL_TO_ALL, buffer.dtype, counts, mean, agreed=agreed)
                return Move(request=request, buffers=(buffer, output), result=(whole, received) if with_rows else whole)

            title = f"all_to_all of {_shown_rows(buffer)}"
            return self._by_rows.start(call, Rows(title=title, own=sent, column=self._own, move=move), waits=waits)

    def barrier(self, *, label: str = "") -> None:
        """Return once every rank has called it."""
        if label or not self._calls.again("barrier"):
            self._start_barrier(label, waits=True).wait()

    def barrier_async(self, *, label: str = "") -> Handle:
        """Start a `barrier`."""
        return self._start_barrier(label, waits=False)

    def _start_barrier(self, label: str, *, waits: bool) -> Handle:
        work = Work(meets=True, repeated=(None, "sum"))
        return self._calls.post(self._calls.next("barrier", label), "barrier", work, waits=waits)

    # ---- messages ----

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send `array` to rank `to`, which must `recv` an array of the same shape and type under the same tag.

        Returns once the array may be changed. Messages between two ranks under one tag arrive in order.
        """
        self._start_message("send", array, to, tag, waits=True).wait()

    def send_async(self, array: Array, to: int, tag: int = 0) -> Handle:
        """Start a `send`."""
        return self._start_message("send", array, to, tag, waits=False)

    def recv(self, array: Array, source: int, tag: int = 0) -> None:
        """Overwrite `array` with what rank `source` sends here under `tag`."""
        self._start_message("recv", array, source, tag, waits=True).wait()

    def recv_async(self, array: Array, source: int, tag: int = 0) -> Handle:
        """Start a `recv`."""
        return self._start_message("recv", array, source, tag, waits=False)

    def _start_message(self, name: str, array: Array, peer: int, tag: int, *, waits: bool) -> Handle:
        peer = self._rank_of("to" if name == "send" else "source", peer)
        if peer == self._own:
            raise ArgumentError(f"{name}: rank {peer} is this rank itself; copy the array instead")
        tag = _number("tag", tag, 0)
        sender, receiver = (self._own, peer) if name == "send" else (peer, self._own)
        call = self._calls.message(name, sender, receiver, tag)
        with self._calls.telling(call):
            buffer = buffer_of(array, writes=name == "recv")
            program = self._calls.message_program(sender, receiver, buffer.count, buffer.dtype)
            title = f"message from rank {sender} to rank {receiver}, tag {tag}, {_shown(buffer)}"
            work = Work(program=program, size_bytes=buffer.size_bytes, output=buffer)
            return self._calls.post(call, title, work, waits=waits)

    # ---- groups ----

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """Return the group of these ranks, or None on ranks that do not belong to it.

        Args:
            ranks: ranks of this group, in the order they have in the new one; every rank of this group passes the same.

        Raises:
            ArgumentError: `ranks` is empty, names a rank twice, or one that is not in this group.
        """
        call = self._calls.next("subgroup")
        with self._calls.telling(call):
            chosen = tuple(self._rank_of("ranks", rank) for rank in ranks)
            if not chosen or len(set(chosen)) != len(chosen):
                raise ArgumentError(f"ranks={list(chosen)}: want at least one, none twice")
            handle = self._calls.post(call, f"subgroup of ranks {list(chosen)}", Work(), waits=True)
        handle.wait()
        if self._own not in chosen:
            return None
        return Group(
            self._calls.services,
            tuple(self._ranks[rank] for rank in chosen),
            self._topology.restricted(chosen),
            self._calls.subgroup_key(call, chosen),
        )

    def subgroup_named(self, ranks: Sequence[int], name: str) -> "Group":
        """Return the group of these ranks that goes by `name`; this rank is one of them.

        Local: it is one group on all of them, who name it alike, each once; the other ranks have no part in it.

        Args:
            ranks: of this group, in the order they have in the new one.
            name: another one than for every other group of the same ranks.

        Raises:
            ArgumentError: `ranks` names a rank twice, or one that is not in this group, or not this one.
        """
        chosen = tuple(self._rank_of("ranks", rank) for rank in ranks)
        if self._own not in chosen or len(set(chosen)) != len(chosen):
            raise ArgumentError(f"ranks={list(chosen)}: want rank {self._own} among them, and none twice")
        key = self._calls.purpose_key(f"ranks {list(chosen)} by the name {name}")
        members = tuple(self._ranks[rank] for rank in chosen)
        return Group(self._calls.services, members, self._topology.restricted(chosen), key)

    def twin(self) -> "Group":
        """Return another group of the same ranks, whose operations have an order of their own.

        Local: the k-th twin that one rank makes belongs together with the k-th of every other.
        """
        return Group(self._calls.services, self._ranks, self._topology, self._calls.twin_key())

    def twin_for(self, purpose: str) -> "Group":
        """Return the group of the same ranks for `purpose`, whose operations have an order of their own.

        Local: it is one group on all ranks, whenever each of them asks for it.
        """
        with self._twins_lock:
            found = self._twins.get(purpose)
            if found is None:
                key = self._calls.purpose_key(purpose)
                found = self._twins[purpose] = Group(self._calls.services, self._ranks, self._topology, key)
            return found

    # ---- the common path ----

    def _rank_of(self, what: str, rank: int) -> int:
        return _number(what, rank, 0, self.size - 1)

    def _chain(self, title: str, finish: Callable[[], Array], *, waits: bool) -> Handle:
        return SteppedHandle(finish) if waits else in_background(finish, title)

    def _splits(self, buffer: Buffer, splits: Sequence[int] | None) -> list[int]:
        rows = buffer.shape[0]
        if splits is None:
            if rows % self.size:
                raise ArgumentError(f"{rows} rows for {self.size} ranks: want a multiple, or splits")
            return [rows // self.size] * self.size
        sent = [_number("splits", each, 0) for each in splits]
        if len(sent) != self.size or sum(sent) != rows:
            raise ArgumentError(f"splits={sent}: want {self.size} numbers >= 0 that add up to the {rows} rows")
        return sent

    def _out(
        self, out: Array | None, shape: tuple[int, ...], source: Buffer, *, own_row: int | None = None
    ) -> tuple[Array, Buffer]:
        """Return `out`, or a new array; with `own_row` the source may be those rows of it, from that one on."""
        dtype = source.dtype
        if out is None:
            out = self.allocate(shape, dtype)
            return out, buffer_of(out, writes=True)
        found = buffer_of(out, writes=True)
        if found.shape != shape or found.dtype != dtype or not found.is_row_major:
            raise ArgumentError(f"out of shape {found.shape}, {found.dtype}: want shape {shape}, {dtype}, row-major")
        own_bytes = 0 if own_row is None else own_row * math.prod(shape[1:]) * found.itemsize
        if own_row is not None and source.address == found.address + own_bytes:
            return out, found
        overlap = min(found.address + found.size_bytes, source.address + source.size_bytes)
        if overlap > max(found.address, source.address):
            raise ArgumentError(
                "out shares memory with the array; want memory of its own, as ranks still read the array"
            )
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


def _number(what: str, value: object, least: int, most: int | None = None) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what it refuses is what is asked for here
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        wanted = f"an integer >= {least}" if most is None else f"a rank of this group, {least} to {most}"
        raise ArgumentError(f"{what}={value!r}: want {wanted}")
    return number
