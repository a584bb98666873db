"""Plans made ready to run: chosen, proven once per job, compiled for this rank, kept."""

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from multiring._native import NOTE_BYTES, Lowering, MoveColumns, Program, ProgramForm, ReduceOp, make_program
from multiring.collectives import direct, exchange
from multiring.errors import ArgumentError
from multiring.planner import Pins, Plan, Task, cheapest, engine_of, refuse_unfit, repriced
from multiring.runtime.arrays import DTYPES, numpy_dtype
from multiring.schedule import (
    NOWHERE,
    OPS,
    SUMS,
    Accumulation,
    Collective,
    Extents,
    Kind,
    Moves,
    Schedule,
    Space,
    Splits,
    Wire,
    accumulation_of,
    check,
    encoded_bytes,
    grain_of,
)
from multiring.topology import Topology

_log = logging.getLogger("multiring")
# Up to here every rank of a host tells every other at once: one exchange, and all know where all buffers lie.
AT_ONCE_MOST = 16
_LINE = 64  # bytes of a cache line
_MOST_COMPARED = 1024  # ranks whose programs are all compared by each: at most 2 s (docs/decisions/0032)
_DRAWN = 511
_MOST_KEPT = 1024  # programs; a training run needs a few dozen

# Their second step may begin whenever it wants, on one rank before others plan anew and on another behind it.
_PLANNED_ONCE = frozenset({Collective.ALL_GATHER, Collective.ALL_TO_ALL})

Counts = int | tuple[int, ...] | Splits


@dataclass(frozen=True, slots=True)
class Request:
    """What decides a program, the same on every rank but for all_to_all's own splits."""

    collective: Collective
    dtype: str
    counts: Counts  # elements, in the form Schedule.extents_of takes
    total: int  # elements of the whole buffer, the longer side
    op: str = "sum"
    root: int = 0
    agreed: str = ""  # what else decides that the ranks mean the same; part of the digest
    wire: Wire = Wire.NONE  # how what crosses hosts is coded

    def __post_init__(self) -> None:
        if not isinstance(self.op, str):  # it may not even be hashable
            raise ArgumentError(f"op={self.op!r}: want one of {', '.join(OPS)}")
        if self.wire and (self.dtype != "float32" or self.op not in {"sum", "average"}):
            raise ArgumentError(
                f"wire={self.wire.name.lower()!r} for the {self.op} of {self.dtype}: want a sum or an average of"
                " float32, or no wire type"
            )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan and this rank's program of it; the program alone runs."""

    plan: Plan
    program: Program
    lowering: Lowering
    digest: bytes  # of the plan, to be agreed on


@dataclass(frozen=True, slots=True)
class Segments:
    """How a buffer is cut into pieces that go through the schedule one beside the other: the elements of each."""

    count: int
    each: Counts
    last: Counts

    @classmethod
    def of(cls, plan: Plan, request: Request) -> "Segments":
        """Return the equal pieces, but for a shorter last one, that are `plan.segment_bytes` long at most.

        Only what is one piece of memory on every rank is cut: the buffers of an all_reduce and a broadcast.
        """
        whole, itemsize = request.counts, numpy_dtype(request.dtype).itemsize
        if plan.segment_bytes is None or not isinstance(whole, int):
            return cls(1, whole, whole)
        count = max(1, -(-whole * itemsize // plan.segment_bytes))
        grain = grain_of(plan.schedule.frame)
        each = -(-whole // (count * grain)) * grain
        count = max(1, -(-whole // max(each, 1)))  # rounding up may have left nothing for the last
        return cls(count, each, whole - (count - 1) * each) if count > 1 else cls(1, whole, whole)


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program's moves are run; `last_segment` is the last segment's program where that is shorter."""

    lowering: Lowering = Lowering.NONE
    segments: int = 1
    last_segment: Program | None = None


MOVE_BY_MOVE = Execution()


class Programs:
    """The programs of one group on this rank. Not thread-safe: the group holds its lock."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        ranks: tuple[int, ...],
        pins: Pins | None = None,
        carrier: str = "tcp",
        *,
        is_alone: bool = False,
    ) -> None:
        """Plan for these ranks.

        Args:
            topology: where they are.
            rank: of the group, whose programs these are.
            ranks: in the world.
            pins: plans that are given.
            carrier: what carries bytes between hosts.
            is_alone: whether it does within hosts, too.
        """
        self._topology = topology
        self._engine = carrier if is_alone else engine_of(topology).replace("tcp", carrier)
        # Those of the job say nothing of a group whose ranks lie in another way.
        self._pins = pins if pins is not None and pins.shape == topology.shape() else None
        self._rank = rank
        self._world_ranks = np.asarray(ranks, np.int32)
        self._compiled: OrderedDict[Request, Compiled] = OrderedDict()
        self._messages: OrderedDict[tuple[int, int, int, str], Program] = OrderedDict()
        self.plans: dict[Task, Plan] = {}
        self._proven: set[bytes] = set()
        self._measured = topology  # with the constants that were measured since
        self._fixed: set[Task] = set()  # what nothing measured changes
        self._former: dict[Task, Plan] = {}
        self._predicted: dict[Task, float] = {}

    def get(self, request: Request) -> Compiled:
        """Return the program of `request`; the same request gets the same plan for as long as the group lives."""
        found = self._compiled.get(request)
        if found is None:
            found = self._compile(request)
            self._compiled[request] = found
            if len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(request)
        return found

    def message(self, sender: int, receiver: int, count: int, dtype: str) -> Program:
        """Return the program of a message between two ranks of the group, one of them this one."""
        key = sender, receiver, count, dtype
        found = self._messages.get(key)
        if found is None:
            one = np.array([count])
            extents = Extents(np.array([Space.OUTPUT], np.uint8), np.zeros_like(one), one, scratch_count=0)
            moves = message_moves(self._rank, sender, receiver)
            found = self._messages[key] = compile_moves(moves, extents, dtype, "sum", self._world_ranks)
            if len(self._messages) > _MOST_KEPT:
                self._messages.popitem(last=False)
        else:
            self._messages.move_to_end(key)
        return found

    def use(self, task: Task, plan: Plan) -> None:
        """Run `plan` for `task` from now on; every rank of the group does the same.

        Raises:
            ScheduleError: the plan's schedule does not do what it promises, or does something else than `task`.
        """
        self._keep(task, plan)
        self._fixed.add(task)

    def replan(self, topology: Topology) -> None:
        """Plan with the constants of `topology` from now on; what is pinned, and what is planned once, stays."""
        self._measured = topology
        self._predicted.clear()
        dropped = {task: plan for task, plan in self.plans.items() if task not in self._fixed}
        self._former.update(dropped)
        for task in dropped:
            del self.plans[task]
        for request in [request for request in self._compiled if task_of(request) in dropped]:
            del self._compiled[request]

    def predicted(self, request: Request) -> float:
        """Return the seconds that `request` is predicted to take with the plan it runs by."""
        task = task_of(request)
        if task not in self._predicted:
            self._predicted[task] = repriced(task, self.plan(request), self._measured)
        return self._predicted[task]

    def _keep(self, task: Task, plan: Plan) -> None:
        refuse_unfit(plan, task, self._topology)
        plan = replace(plan, engine=self._engine)  # a plan file may be another engine's
        self._predicted.pop(task, None)
        if plan.schedule.digest() not in self._proven:
            check(plan.schedule, compared_by(self._rank, plan.schedule.ranks))
            self._proven.add(plan.schedule.digest())
        self.plans[task] = plan
        for request in [request for request in self._compiled if task_of(request) == task]:
            del self._compiled[request]

    def plan(self, request: Request) -> Plan:
        """Return the plan of `request`: pinned, or the cheapest."""
        task = task_of(request)
        plan = self.plans.get(task)
        if plan is None:
            pinned = None if self._pins is None else self._pins.find(task)
            once = task.collective in _PLANNED_ONCE
            plan = cheapest(task, self._topology if once else self._measured) if pinned is None else pinned
            self._keep(task, plan)
            plan = self.plans[task]
            if once or pinned is not None:
                self._fixed.add(task)
            former = self._former.pop(task, plan)
            if former.schedule != plan.schedule or former.segment_bytes != plan.segment_bytes:
                _log.warning(
                    "%s of %d bytes runs by another plan from now on: %s instead of %s",
                    task.collective.value,
                    task.size_bytes,
                    plan,
                    former,
                )
            if self._rank == 0:
                _log.info(
                    "%s of %d bytes on ranks %s: %s, %s; %.3g ms predicted",
                    task.collective.value,
                    task.size_bytes,
                    self._world_ranks.tolist(),
                    plan,
                    "chosen" if pinned is None else "pinned",
                    plan.predicted_seconds * 1e3,
                )
        return plan

    def _compile(self, request: Request) -> Compiled:
        plan = self.plan(request)
        schedule = plan.schedule
        moves = schedule.moves_of(self._rank)
        segments = Segments.of(plan, request)
        size_bytes = request.total * numpy_dtype(request.dtype).itemsize
        whole = segments.count == 1
        on_one_host = len(self._topology.hosts) == 1
        lowering = lowering_of(schedule, size_bytes, on_one_host=on_one_host) if whole else Lowering.NONE
        last = None
        if segments.last != segments.each:
            extents = schedule.extents_of(self._rank, segments.last)
            last = compile_moves(moves, extents, request.dtype, request.op, self._world_ranks)
        program = compile_moves(
            moves,
            schedule.extents_of(self._rank, segments.each),
            request.dtype,
            request.op,
            self._world_ranks,
            Execution(lowering, segments.count, last),
        )
        return Compiled(plan, program, lowering, digest_of(plan, request))


def digest_of(plan: Plan, request: Request) -> bytes:
    """Return what the ranks agree on of how `request` runs."""
    meant = plan.schedule.digest() + f"{plan.engine} {plan.segment_bytes} {request.agreed}".encode()
    return hashlib.blake2b(meant, digest_size=16).digest()


def compared_by(rank: int, ranks: int) -> list[int] | None:
    """Return whose programs `rank` compares when it proves a schedule of `ranks` ranks; None: all.

    Of many ranks itself, so that between them the ranks of a job compare all, and others drawn by its number.
    """
    if ranks <= _MOST_COMPARED:
        return None
    return [rank, *Random(rank).sample(range(ranks), _DRAWN)]  # noqa: S311 nobody is to be surprised by it


def task_of(request: Request) -> Task:
    """Return what is planned for `request`."""
    dtype = numpy_dtype(request.dtype)
    sums = request.collective in SUMS
    return Task(
        collective=request.collective,
        size_bytes=request.total * dtype.itemsize,
        accumulation=accumulation_of(dtype, request.op) if sums else Accumulation.SAME,
        root=request.root,
        wire=request.wire,
    )


def lowering_of(schedule: Schedule, size_bytes: int, *, on_one_host: bool) -> Lowering:
    """Return how the native core may run `schedule` at once; whether it does is decided with the buffers at hand.

    That the moves have the form which the lowering stands for the core sees to itself, of each program.
    """
    patterns = {phase.pattern for phase in schedule.phases}
    if schedule.collective is not Collective.ALL_REDUCE or schedule.frame.is_coded or schedule.frame.joined:
        return Lowering.NONE
    within = on_one_host and len(schedule.grid) == 1
    if within and patterns == {direct.REDUCE_SCATTER, direct.ALL_GATHER}:
        return Lowering.SLICE
    if patterns != {exchange.ALL_REDUCE}:
        return Lowering.NONE
    if within and schedule.ranks <= AT_ONCE_MOST:
        return Lowering.EXCHANGE
    return Lowering.NOTES if size_bytes <= NOTE_BYTES else Lowering.NONE


def compile_moves(
    moves: Moves,
    extents: Extents,
    dtype: str,
    op: str,
    world_ranks: NDArray[np.int32],
    execution: Execution = MOVE_BY_MOVE,
) -> Program:
    """Return one rank's moves with chunks resolved to bytes and peers to world ranks; the extents are a segment's."""
    itemsize = numpy_dtype(dtype).itemsize
    ends = np.concatenate([[0], np.cumsum(extents.count)])
    sends = moves.kind == Kind.SEND
    first = np.where(sends, moves.src, moves.dst)
    size = (ends[first + moves.span] - ends[first]) * itemsize
    source = np.maximum(moves.src, 0)  # a move without a source never reads it
    target = np.maximum(moves.dst, 0)
    scratch_bytes = extents.scratch_count * itemsize
    coded_offset, end = _coded_offsets(moves, size // itemsize, scratch_bytes)
    # The last segment is the shorter one, but cut at the same grain one of its chunks may be the longer.
    last_bytes = execution.last_segment.scratch_bytes if execution.last_segment else 0
    columns = MoveColumns(
        kind=moves.kind,
        last=moves.last.astype(np.uint8),
        channel=moves.channel,
        source_space=extents.space[source],
        source_offset=extents.offset[source] * itemsize,
        target_space=extents.space[target],
        target_offset=extents.offset[target] * itemsize,
        size=size,
        peer_start=moves.peer_start,
        peers=world_ranks[moves.peers],
        wire=moves.wire,
        keeps_coded=(sends & (moves.dst != NOWHERE)).astype(np.uint8),
        coded_offset=coded_offset,
    )
    form = ProgramForm(
        scratch_bytes=max(end, last_bytes),
        dtype=DTYPES[dtype],
        op=getattr(ReduceOp, "sum" if op == "average" else op),
        divisor=len(world_ranks) if op == "average" else 1,
        lowering=execution.lowering,
        segments=execution.segments,
        segment_bytes=int(extents.count[extents.space == Space.OUTPUT].sum()) * itemsize,
        last_segment=execution.last_segment,
    )
    return make_program(columns, form)


def _coded_offsets(moves: Moves, elements: NDArray[np.int64], start: int) -> tuple[NDArray[np.int64], int]:
    """Return where in scratch each coded SEND puts its encoding, in bytes, behind `start`, and where the last ends."""
    sizes = np.zeros(len(moves), np.int64)
    for row in np.flatnonzero((moves.kind == Kind.SEND) & (moves.wire != Wire.NONE)):
        sizes[row] = -(-encoded_bytes(Wire(moves.wire[row]), int(elements[row])) // _LINE) * _LINE
    ends = -(-start // _LINE) * _LINE + np.cumsum(sizes)
    return ends - sizes, int(ends[-1]) if sizes.any() else start


def message_moves(rank: int, sender: int, receiver: int) -> Moves:
    """Return the one move of a message between two ranks of a group: chunk 0, on channel 0."""
    kind = Kind.SEND if rank == sender else Kind.COPY
    peer = receiver if rank == sender else sender
    return Moves(
        kind=np.array([kind], np.uint8),
        channel=np.zeros(1, np.uint16),
        src=np.zeros(1, np.int32),
        dst=np.zeros(1, np.int32),
        span=np.ones(1, np.int32),
        last=np.zeros(1, np.bool_),
        peer_start=np.array([0, 1], np.int32),
        peers=np.array([peer], np.int32),
    )


def direct_rounds(ranks: int, rank: int) -> list[tuple[int, int]]:
    """Return the (to, from) ranks with which `rank` meets every other rank."""
    return [((rank + distance) % ranks, (rank - distance) % ranks) for distance in range(1, ranks)]


def agreement_rounds(grid: tuple[int, ...], order: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """Return the (to, from) ranks of each round of agreement on the grid, for `rank`.

    Dissemination along each axis in turn: after the rounds of distance 1, 2, 4, ... on an axis of q ranks,
    ceil(log2 q) of them, every rank has heard, directly or not, from all of its line; after the last axis, from
    all (Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization").
    """
    rounds = []
    position, stride = order.index(rank), 1
    for size in grid:
        at = position // stride % size
        base = position - at * stride
        distance = 1
        while distance < size:
            to, source = (at + distance) % size, (at - distance) % size
            rounds.append((order[base + to * stride], order[base + source * stride]))
            distance *= 2
        stride *= size
    return rounds
