"""Choose, prove and compile the plans of a group, and cache its programs.

Each schedule is proven once per group, and compiled for this rank.
"""

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from multiring._collectives import direct, exchange
from multiring._native import NOTE_BYTES, Lowering, MoveColumns, Program, ProgramForm, ReduceOp, make_program
from multiring._runtime.arrays import DTYPES, numpy_dtype
from multiring._schedule import (
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
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner import Pins, Plan, Task, cheapest, engine_of, refuse_unfit, repriced

_log = logging.getLogger("multiring")
# Up to this number of ranks on one host, every rank sends its buffer's location to all others in a single exchange.
AT_ONCE_MOST = 16
_LINE = 64  # bytes of a cache line
_MOST_COMPARED = 1024  # up to this many ranks, each rank compares all programs; takes 2 s at most (docs/decisions/0032)
_DRAWN = 511
_MOST_KEPT = 1024  # programs in the cache; a training run needs a few dozen

# These collectives have a second step. A new planning may come before this step on one rank and after it on another
# rank.
_PLANNED_ONCE = frozenset({Collective.ALL_GATHER, Collective.ALL_TO_ALL})

Counts = int | tuple[int, ...] | Splits


@dataclass(frozen=True, slots=True)
class Request:
    """The properties that determine a program.

    The properties are the same on every rank, except for the splits of all_to_all.
    """

    collective: Collective
    dtype: str
    counts: Counts  # the numbers of elements, in the form that Schedule.extents_of accepts
    total: int  # the number of elements in the longer of the two buffers
    op: str = "sum"
    root: int = 0
    agreed: str = ""  # a further text on which the ranks must agree; part of the digest
    wire: Wire = Wire.NONE  # the encoding of data between hosts

    def __post_init__(self) -> None:
        if not isinstance(self.op, str):  # a value that is not a text may not be hashable
            raise ArgumentError(f"op={self.op!r}: want one of {', '.join(OPS)}")
        if self.wire and (self.dtype != "float32" or self.op not in {"sum", "average"}):
            raise ArgumentError(
                f"wire={self.wire.name.lower()!r} for the {self.op} of {self.dtype}: want a sum or an average of"
                " float32, or no wire type"
            )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan and this rank's compiled program for it."""

    plan: Plan
    program: Program
    lowering: Lowering
    digest: bytes  # the plan's digest, on which the ranks agree


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a buffer: their count and their elements.

    The segments run through the schedule concurrently.
    """

    count: int
    each: Counts
    last: Counts

    @classmethod
    def of(cls, plan: Plan, request: Request) -> "Segments":
        """Cut the buffer into equal segments of at most `plan.segment_bytes` bytes.

        The last segment may be shorter. Only a buffer that is a single piece of memory on every rank is cut: that of an
        all_reduce or a broadcast.
        """
        whole, itemsize = request.counts, numpy_dtype(request.dtype).itemsize
        if plan.segment_bytes is None or not isinstance(whole, int):
            return cls(1, whole, whole)
        count = max(1, -(-whole * itemsize // plan.segment_bytes))
        grain = grain_of(plan.schedule.frame)
        each = -(-whole // (count * grain)) * grain
        count = max(1, -(-whole // max(each, 1)))  # rounding up may have left no elements for the last segment
        return cls(count, each, whole - (count - 1) * each) if count > 1 else cls(1, whole, whole)


@dataclass(frozen=True, slots=True)
class ProgramExecution:
    """How a program's moves are executed.

    `last_segment` is the program of the last segment, if that segment is shorter.
    """

    lowering: Lowering = Lowering.NONE
    segments: int = 1
    last_segment: Program | None = None


MOVE_BY_MOVE = ProgramExecution()


class Programs:
    """The programs of one group on this rank.

    The object is not thread-safe: the caller must hold the group's lock.
    """

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
        """Create an empty cache of programs.

        Args:
            topology: the hosts of the group's ranks and the links between them.
            rank: this process's rank in the group.
            ranks: the group's ranks in the world.
            pins: plans that the user has given.
            carrier: the transport or engine that moves data between hosts.
            is_alone: whether `carrier` also moves the data within hosts.
        """
        self._topology = topology
        self._engine = carrier if is_alone else engine_of(topology).replace("tcp", carrier)
        # The job's pinned plans do not apply to a group whose topology has another shape.
        self._pins = pins if pins is not None and pins.shape == topology.shape() else None
        self._rank = rank
        self._world_ranks = np.asarray(ranks, np.int32)
        self._compiled: OrderedDict[Request, Compiled] = OrderedDict()
        self._messages: OrderedDict[tuple[int, int, int, str], Program] = OrderedDict()
        self.plans: dict[Task, Plan] = {}
        self._proven: set[bytes] = set()
        self._measured = topology  # the topology with measured constants
        self._fixed: set[Task] = set()  # the tasks that keep their plans, whatever the ranks measure
        self._former: dict[Task, Plan] = {}
        self._predicted: dict[Task, float] = {}

    def get(self, request: Request) -> Compiled:
        """Return the program of `request`.

        The plan of a request stays the same until `use` or `replan` changes it.
        """
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
        """Return the program of a message between this rank and another rank of the group."""
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
        """Use `plan` for `task` from now on. Every rank of the group must do the same.

        Raises:
            ScheduleError: the plan's schedule does not compute the collective that it declares, or does not fit `task`.
        """
        self._keep(task, plan)
        self._fixed.add(task)

    def replan(self, topology: Topology) -> None:
        """Plan with the constants of `topology` from now on.

        Pinned plans, and plans that are made once, stay.
        """
        self._measured = topology
        self._predicted.clear()
        dropped = {task: plan for task, plan in self.plans.items() if task not in self._fixed}
        self._former.update(dropped)
        for task in dropped:
            del self.plans[task]
        for request in [request for request in self._compiled if task_of(request) in dropped]:
            del self._compiled[request]

    def predicted(self, request: Request) -> float:
        """Return the predicted time of `request` with its plan, in seconds."""
        task = task_of(request)
        if task not in self._predicted:
            self._predicted[task] = repriced(task, self.plan(request), self._measured)
        return self._predicted[task]

    def _keep(self, task: Task, plan: Plan) -> None:
        refuse_unfit(plan, task, self._topology)
        plan = replace(plan, engine=self._engine)  # a plan file may have been written for another engine
        self._predicted.pop(task, None)
        if plan.schedule.digest() not in self._proven:
            check(plan.schedule, compared_by(self._rank, plan.schedule.ranks))
            self._proven.add(plan.schedule.digest())
        self.plans[task] = plan
        for request in [request for request in self._compiled if task_of(request) == task]:
            del self._compiled[request]

    def plan(self, request: Request) -> Plan:
        """Return the plan of `request`: the pinned plan, or else the cheapest plan."""
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
                    "%s of %d bytes runs with another plan from now on: %s instead of %s",
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
            ProgramExecution(lowering, segments.count, last),
        )
        return Compiled(plan, program, lowering, digest_of(plan, request))


def digest_of(plan: Plan, request: Request) -> bytes:
    """Return the digest of `plan` and `request` on which the ranks agree."""
    meant = plan.schedule.digest() + f"{plan.engine} {plan.segment_bytes} {request.agreed}".encode()
    return hashlib.blake2b(meant, digest_size=16).digest()


def compared_by(rank: int, ranks: int) -> list[int] | None:
    """Return the ranks whose programs `rank` compares in the proof of a schedule.

    None means all ranks of the schedule. In a large group, each rank compares its own program and the programs of some
    other ranks, which are drawn at random with `rank` as the seed. Together the ranks compare all programs.
    """
    if ranks <= _MOST_COMPARED:
        return None
    return [rank, *Random(rank).sample(range(ranks), _DRAWN)]  # noqa: S311 -- the draw need not be unpredictable


def task_of(request: Request) -> Task:
    """Return the planner's task for `request`."""
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
    """Return the lowering that runs the whole `schedule` in one step.

    Lowering.NONE means that there is none. The core decides for each call, from its buffers, whether it uses the
    lowering. It also checks, for each program, that the moves have the form that the lowering requires.
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
    execution: ProgramExecution = MOVE_BY_MOVE,
) -> Program:
    """Return the program of one rank's moves.

    Chunks are resolved to byte ranges, and peers to world ranks. The extents are those of one segment.
    """
    itemsize = numpy_dtype(dtype).itemsize
    ends = np.concatenate([[0], np.cumsum(extents.count)])
    sends = moves.kind == Kind.SEND
    first = np.where(sends, moves.src, moves.dst)
    size = (ends[first + moves.span] - ends[first]) * itemsize
    source = np.maximum(moves.src, 0)  # a move without a source never reads it
    target = np.maximum(moves.dst, 0)
    scratch_bytes = extents.scratch_count * itemsize
    coded_offset, end = _coded_offsets(moves, size // itemsize, scratch_bytes)
    # The last segment is shorter. One of its chunks may still be longer, because chunks are rounded to the grain.
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
    """Return the place in scratch of each coded SEND's encoding.

    The result is each SEND's byte offset, after `start`, and the end of the last encoding.
    """
    sizes = np.zeros(len(moves), np.int64)
    for row in np.flatnonzero((moves.kind == Kind.SEND) & (moves.wire != Wire.NONE)):
        sizes[row] = -(-encoded_bytes(Wire(moves.wire[row]), int(elements[row])) // _LINE) * _LINE
    ends = -(-start // _LINE) * _LINE + np.cumsum(sizes)
    return ends - sizes, int(ends[-1]) if sizes.any() else start


def message_moves(rank: int, sender: int, receiver: int) -> Moves:
    """Return the single move of a message. It moves chunk 0 on channel 0."""
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
    """Return one (to, from) pair of ranks per round of a direct exchange.

    In these rounds `rank` exchanges data with every other rank.
    """
    return [((rank + distance) % ranks, (rank - distance) % ranks) for distance in range(1, ranks)]


def agreement_rounds(grid: tuple[int, ...], order: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """Return the (to, from) ranks of each round of agreement on the grid, for `rank`.

    The rounds disseminate along one axis after the other. An axis of q ranks takes ceil(log2 q) rounds, with distances
    1, 2, 4, .... After them every rank has received, directly or indirectly, from all ranks in its line on that axis;
    after the last axis, from all ranks. Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier
    synchronization".
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
