"""Group: the ranks that do collectives together, and the collectives."""

import hashlib
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring._native import Context, Operation, OperationSpec, Program, Rounds
from multiring.errors import ArgumentError, StateError
from multiring.runtime.arrays import Buffer, buffer_of, numpy_dtype
from multiring.runtime.events import NAMES, STEPS
from multiring.runtime.handles import ChainedHandle, Handle, OperationHandle
from multiring.runtime.programs import Programs, Request, agreement_rounds, compile_moves, message_moves
from multiring.schedule import Collective, Extents, Schedule, Space, Splits
from multiring.topology import Topology, grid_of

Array = Any  # NumPy, DLPack or buffer protocol; see runtime/arrays.py
_NAME_INDEX = {name: index for index, name in enumerate(NAMES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """What every group of one process shares."""

    context: Context
    world_rank: int
    stall_warn_s: float
    chain: Callable[[], Executor]  # the thread that takes the later steps of operations with several


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation as it was called: what ranks must agree on, in words and as a digest."""

    name: str
    description: str
    plan_digest: bytes = b""
    size_bytes: int = 0


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
    """

    def __init__(self, rank: Rank, ranks: tuple[int, ...], hosts: tuple[tuple[int, ...], ...], key: bytes) -> None:
        self._rank = rank
        self._context = rank.context
        self._ranks = ranks
        self._own = ranks.index(rank.world_rank)
        self._hosts = hosts
        self._key = key
        self._id = _identifier(key)
        topology = Topology(hosts)
        self._grid, self._order = grid_of(topology)
        self._programs = Programs(topology, self._own, ranks)
        self._at_once = len(hosts) == 1 and len(ranks) <= 16
        if self._at_once:
            pairs = [((self._own + k) % len(ranks), (self._own - k) % len(ranks)) for k in range(1, len(ranks))]
        else:
            pairs = agreement_rounds(self._grid, self._order, self._own)
        self._rounds = Rounds([(ranks[to], ranks[source]) for to, source in pairs])
        self._lock = threading.Lock()
        self._sequence = 0
        self._messages: dict[tuple[int, int, int], int] = {}
        self._held: deque[tuple[Operation, list[object]]] = deque()

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
        return self._grid

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
        return self._context.allocate(size)[:size].view(kind).reshape(dims)

    # ---- collectives ----

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Combine every rank's `array` into all of them, in place.

        Args:
            array: any shape, the same on all ranks, as is the order of its strides.
            op: "sum", "average", "min", "max" or "product" (docs/algorithms.md: by type).
        """
        self._start_all_reduce(array, op, waits=True).wait()

    def all_reduce_async(self, array: Array, op: str = "sum") -> Handle:
        """Start an `all_reduce`."""
        return self._start_all_reduce(array, op, waits=False)

    def _start_all_reduce(self, array: Array, op: str, *, waits: bool) -> Handle:
        sequence = self._next()
        with self._told("all_reduce", sequence):
            buffer = buffer_of(array, writes=True)
            request = Request(Collective.ALL_REDUCE, buffer.dtype, buffer.count, buffer.count, op)
            title = f"all_reduce {op} {_shown(buffer)}"
            return self._run("all_reduce", sequence, title, request, (None, buffer), None, waits=waits)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Overwrite every rank's `array` with rank `root`'s, in place.

        Args:
            array: any shape, the same on all ranks, as is the order of its strides.
            root: a rank of the group.
        """
        self._start_broadcast(array, root, waits=True).wait()

    def broadcast_async(self, array: Array, root: int = 0) -> Handle:
        """Start a `broadcast`."""
        return self._start_broadcast(array, root, waits=False)

    def _start_broadcast(self, array: Array, root: int, *, waits: bool) -> Handle:
        sequence = self._next()
        with self._told("broadcast", sequence):
            root = self._rank_of("root", root)
            buffer = buffer_of(array, writes=self._own != root)
            request = Request(Collective.BROADCAST, buffer.dtype, buffer.count, buffer.count, root=root)
            title = f"broadcast from rank {root} {_shown(buffer)}"
            return self._run("broadcast", sequence, title, request, (None, buffer), None, waits=waits)

    def reduce_scatter(self, array: Array, out: Array | None = None, op: str = "sum") -> Array:
        """Combine every rank's `array` and return this rank's part of the rows; `array` stays as it is.

        Args:
            array: shape (n, ...), the same on all ranks, row-major. Rank r gets n // size rows, and one more where
                r < n % size.
            out: where to put them, row-major; a new array in the arena by default.
            op: as for all_reduce.
        """
        return self._start_reduce_scatter(array, out, op, waits=True).wait()

    def reduce_scatter_async(self, array: Array, out: Array | None = None, op: str = "sum") -> Handle:
        """Start a `reduce_scatter`."""
        return self._start_reduce_scatter(array, out, op, waits=False)

    def _start_reduce_scatter(self, array: Array, out: Array | None, op: str, *, waits: bool) -> Handle:
        sequence = self._next()
        with self._told("reduce_scatter", sequence):
            buffer = _rows(buffer_of(array, writes=False))
            rows = [buffer.shape[0] // self.size + (r < buffer.shape[0] % self.size) for r in range(self.size)]
            width = math.prod(buffer.shape[1:])
            out = self._out(out, (rows[self._own], *buffer.shape[1:]), buffer.dtype)
            counts = tuple(each * width for each in rows)
            request = Request(Collective.REDUCE_SCATTER, buffer.dtype, counts, buffer.count, op)
            title = f"reduce_scatter {op} {_shown(buffer)}"
            buffers = (buffer, buffer_of(out, writes=True))
            return self._run("reduce_scatter", sequence, title, request, buffers, out, waits=waits)

    def all_gather(self, array: Array, out: Array | None = None) -> Array:
        """Return every rank's `array`, one after the other along the first dimension.

        Args:
            array: shape (n_r, ...), row-major; the ranks may differ in n_r only.
            out: shape (sum of n_r, ...), row-major; a new array in the arena by default.
        """
        return self._start_all_gather(self._next(), array, out, waits=True)()

    def all_gather_async(self, array: Array, out: Array | None = None) -> Handle:
        """Start an `all_gather`."""
        return self._chain("all_gather", self._start_all_gather(self._next(), array, out, waits=False))

    def _start_all_gather(self, sequence: int, array: Array, out: Array | None, *, waits: bool) -> Callable[[], Array]:
        with self._told("all_gather", sequence):
            buffer = _rows(buffer_of(array, writes=False))
            inner = "x".join(map(str, buffer.shape[1:])) or "scalar"
            gathered = self._counts(sequence, f"all_gather of {buffer.dtype} rows of {inner}", buffer.shape[:1], waits)

        def finish() -> Array:
            rows = [int(row) for row in gathered.wait()]
            with self._told("all_gather", sequence + 1):
                width = math.prod(buffer.shape[1:])
                whole = self._out(out, (sum(rows), *buffer.shape[1:]), buffer.dtype)
                counts = tuple(row * width for row in rows)
                request = Request(Collective.ALL_GATHER, buffer.dtype, counts, sum(counts))
                title = f"all_gather of {buffer.dtype} rows of {inner}"
                buffers = (buffer, buffer_of(whole, writes=True))
                handle = self._run("all_gather", sequence + 1, title, request, buffers, whole, waits=True)
            return handle.wait()

        return finish

    def all_to_all(self, array: Array, out: Array | None = None, splits: Sequence[int] | None = None) -> Array:
        """Send each rank its rows of `array`, and return the rows they all sent here, by sender.

        Args:
            array: shape (n, ...), row-major.
            out: shape (rows received, ...), row-major; a new array in the arena by default.
            splits: how many rows go to each rank; without it n must be a multiple of the group's size.
        """
        return self._start_all_to_all(self._next(), array, out, splits, waits=True)()

    def all_to_all_async(self, array: Array, out: Array | None = None, splits: Sequence[int] | None = None) -> Handle:
        """Start an `all_to_all`."""
        return self._chain("all_to_all", self._start_all_to_all(self._next(), array, out, splits, waits=False))

    def _start_all_to_all(
        self, sequence: int, array: Array, out: Array | None, splits: Sequence[int] | None, *, waits: bool
    ) -> Callable[[], Array]:
        with self._told("all_to_all", sequence):
            buffer = _rows(buffer_of(array, writes=False))
            sent = self._splits(buffer, splits)
            title = f"all_to_all of {buffer.dtype} rows of {'x'.join(map(str, buffer.shape[1:])) or 'scalar'}"
            exchanged = self._counts(sequence, title, sent, waits)

        def finish() -> Array:
            table = np.asarray(exchanged.wait()).reshape(self.size, self.size)
            received = [int(rows) for rows in table[:, self._own]]
            with self._told("all_to_all", sequence + 1):
                width = math.prod(buffer.shape[1:])
                whole = self._out(out, (sum(received), *buffer.shape[1:]), buffer.dtype)
                counts = Splits(tuple(rows * width for rows in sent), tuple(rows * width for rows in received))
                # The plan must not depend on one rank's splits: every rank prices the job's mean buffer.
                total = int(table.sum()) * width // self.size
                request = Request(Collective.ALL_TO_ALL, buffer.dtype, counts, total)
                buffers = (buffer, buffer_of(whole, writes=True))
                handle = self._run("all_to_all", sequence + 1, title, request, buffers, whole, waits=True)
            return handle.wait()

        return finish

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._start_barrier(waits=True).wait()

    def barrier_async(self) -> Handle:
        """Start a `barrier`."""
        return self._start_barrier(waits=False)

    def _start_barrier(self, *, waits: bool) -> Handle:
        return self._post(_Call("barrier", "barrier"), self._next(), None, (None, None), None, waits=waits)

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
        with self._lock:
            number = self._messages.get((sender, receiver, tag), 0)
            self._messages[sender, receiver, tag] = number + STEPS
        pair = Rounds([(self._ranks[peer], self._ranks[peer])])
        key = (_identifier(self._key, "message", sender, receiver, tag), number)
        members = [self._ranks[self._own], self._ranks[peer]]
        with self._told(name, number, key=key, members=members, rounds=pair):
            buffer = buffer_of(array, writes=name == "recv")
            extents = Extents(
                np.array([Space.OUTPUT], np.uint8), np.zeros(1, np.int64), np.array([buffer.count]), scratch_count=0
            )
            moves = message_moves(self._own, sender, receiver)
            program = compile_moves(moves, extents, buffer.dtype, "sum", np.asarray(self._ranks, np.int32))
            title = f"message from rank {sender} to rank {receiver}, tag {tag}, {_shown(buffer)}"
            call = _Call(name, title, b"", buffer.size_bytes)
            return self._post(
                call, number, program, (None, buffer), None, waits=waits, key=key, members=members, rounds=pair
            )

    # ---- groups ----

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """Return the group of these ranks, or None on ranks that do not belong to it.

        Args:
            ranks: ranks of this group, in the order they have in the new one; every rank of this group passes the same.

        Raises:
            ArgumentError: `ranks` is empty, names a rank twice, or one that is not in this group.
        """
        sequence = self._next()
        with self._told("subgroup", sequence):
            chosen = tuple(self._rank_of("ranks", rank) for rank in ranks)
            if not chosen or len(set(chosen)) != len(chosen):
                raise ArgumentError(f"ranks={list(chosen)}: want at least one, none twice")
            call = _Call("subgroup", f"subgroup of ranks {list(chosen)}")
            handle = self._post(call, sequence, None, (None, None), None, waits=True)
        handle.wait()
        if self._own not in chosen:
            return None
        hosts = [[chosen.index(rank) for rank in host if rank in chosen] for host in self._hosts]
        key = hashlib.blake2b(self._key + repr((sequence, chosen)).encode(), digest_size=16).digest()
        return Group(
            self._rank, tuple(self._ranks[rank] for rank in chosen), tuple(tuple(host) for host in hosts if host), key
        )

    # ---- for tests and tools ----

    def schedule_of_all_reduce(self, array: Array, op: str = "sum") -> Schedule:
        """Return the schedule that `all_reduce(array, op)` runs; local."""
        buffer = buffer_of(array, writes=True)
        with self._lock:
            return self._programs.schedule_of(
                Request(Collective.ALL_REDUCE, buffer.dtype, buffer.count, buffer.count, op)
            )

    # ---- the common path ----

    def _next(self) -> int:
        with self._lock:
            self._sequence += STEPS
            return self._sequence

    def _rank_of(self, what: str, rank: int) -> int:
        return _number(what, rank, 0, self.size - 1)

    def _run(
        self,
        name: str,
        sequence: int,
        title: str,
        request: Request,
        buffers: tuple[Buffer | None, Buffer | None],
        result: Any,
        *,
        waits: bool,
    ) -> Handle:
        with self._lock:
            compiled = self._programs.get(request)
        size_bytes = request.total * numpy_dtype(request.dtype).itemsize
        call = _Call(name, title, compiled.digest, size_bytes)
        return self._post(call, sequence, compiled.program, buffers, result, waits=waits)

    def _post(
        self,
        call: _Call,
        sequence: int,
        program: Program | None,
        buffers: tuple[Buffer | None, Buffer | None],
        result: Any,
        *,
        waits: bool,
        key: tuple[int, int] | None = None,
        members: Sequence[int] | None = None,
        rounds: Rounds | None = None,
    ) -> Handle:
        digest = hashlib.blake2b(call.description.encode() + call.plan_digest, digest_size=16).digest()
        spec = OperationSpec(
            key=key or (self._id, sequence),
            members=list(members or self._ranks),
            rounds=rounds or self._rounds,
            at_once=rounds is None and self._at_once,
            digest=digest,
            description=call.description,
            program=program,
            input=buffers[0].address if buffers[0] else 0,
            output=buffers[1].address if buffers[1] else 0,
            user_bytes=call.size_bytes,
            name=_NAME_INDEX[call.name],
        )
        operation = self._context.post(spec, waits)
        title = f"{call.description} (operation {sequence // STEPS} of the group of {self.size})"
        memory: list[object] = [*buffers]
        handle = OperationHandle(
            self._context, operation, title, stall_warn_s=self._rank.stall_warn_s, result=result, memory=memory
        )
        # Whoever drops a handle must not free memory that ranks still read and write.
        with self._lock:
            while self._held and self._context.has_ended(self._held[0][0]):
                self._held.popleft()
            self._held.append((operation, memory))
        return handle

    def _told(self, name: str, sequence: int, **post: Any) -> "_Told":
        return _Told(self, name, sequence, post)

    def _counts(self, sequence: int, title: str, rows: Sequence[int], waits: bool) -> Handle:
        """Gather every rank's `rows`; the first step of what may differ between ranks."""
        own = np.asarray(rows, np.int64)
        table = np.empty(len(own) * self.size, np.int64)
        request = Request(Collective.ALL_GATHER, "int64", (len(own),) * self.size, len(table))
        buffers = buffer_of(own, writes=False), buffer_of(table, writes=True)
        return self._run("counts", sequence, title, request, buffers, table, waits=waits)

    def _chain(self, title: str, finish: Callable[[], Array]) -> Handle:
        return ChainedHandle(self._rank.chain().submit(finish), title)

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

    def _out(self, out: Array | None, shape: tuple[int, ...], dtype: str) -> Array:
        if out is None:
            return self.allocate(shape, dtype)
        found = buffer_of(out, writes=True)
        if found.shape != shape or found.dtype != dtype or not found.is_row_major:
            raise ArgumentError(
                f"out of shape {found.shape}, {found.dtype}: want shape {shape}, {dtype}, the last dimension the fastest"
            )
        return out


class _Told:
    """Tells the other ranks of a call that this one got wrong: they raise instead of waiting for it."""

    def __init__(self, group: Group, name: str, sequence: int, post: dict[str, Any]) -> None:
        self._group = group
        self._name = name
        self._sequence = sequence
        self._post = post

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, StateError):
            return
        call = _Call(self._name, f"{self._name} failed with {type(error).__name__}: {error}")
        self._group._post(call, self._sequence, None, (None, None), None, waits=False, **self._post)


def _rows(buffer: Buffer) -> Buffer:
    if not buffer.shape:
        raise ArgumentError("array of no dimensions: want at least one, to cut rows from")
    if not buffer.is_row_major:
        raise ArgumentError(
            f"array of shape {buffer.shape} and strides {buffer.strides} (in elements): want the last dimension the fastest"
        )
    return buffer


def _shown(buffer: Buffer) -> str:
    order = "" if buffer.is_row_major else f", dimensions by stride {buffer.layout}"
    return f"{buffer.dtype} of shape {buffer.shape}{order}"


def _number(what: str, value: object, least: int, most: int | None = None) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what it refuses is what is asked for here
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        wanted = f"an integer >= {least}" if most is None else f"a rank of this group, {least} to {most}"
        raise ArgumentError(f"{what}={value!r}: want {wanted}")
    return number


def _identifier(key: bytes, *parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(key + repr(parts).encode(), digest_size=8).digest(), "little")
