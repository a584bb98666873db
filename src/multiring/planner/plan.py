"""Choose a plan by price alone, so that every rank chooses the same plan."""

import math
from bisect import insort
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from multiring._schedule import Accumulation, Collective, Schedule, Way, Wire, least, names_of, price
from multiring._topology import Topology, grid_of
from multiring.errors import ArgumentError, ScheduleError
from multiring.planner.candidates import candidates, segments_of, wires_of
from multiring.planner.ways import ways_of

NOTES_BYTES = 64 << 10  # an exchange up to this size travels with the agreement; equals the native core's NOTE_BYTES
# The cost of cutting a buffer, in message overheads: ranks wake up for each piece until the stream is full. Measured on
# 2 hosts x 1 rank, no rate limit, 512 KiB: two pieces took 100 to 180 us longer than priced, and a message took 37 us
# (docs/decisions/0011).
_CUT_MESSAGES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, the engine that carries its bytes, and its predicted time."""

    schedule: Schedule
    engine: str  # "shm", "tcp", "mpi"; "shm+tcp", "shm+mpi": shm within hosts; or another engine's name
    predicted_seconds: float
    segment_bytes: int | None = None  # length of the pieces that run through the schedule side by side; None: one piece

    @property
    def wire(self) -> Wire:
        """The lossy wire type of the axes that cross hosts, or NONE."""
        return max(self.schedule.wires)

    def __str__(self) -> str:
        cut = "" if self.segment_bytes is None else f", segments of {self.segment_bytes >> 10} KiB"
        return f"{self.schedule}{cut}, by {self.engine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The operation for which a plan is made.

    `size_bytes` is the size of the whole buffer: the blocks of all ranks, on the longer side. `accumulation` is the
    accumulation that the sum needs; see `accumulation_of`. `root` is the rank that broadcasts. `wire` is the wire type
    for messages between hosts.

    Raises:
        ArgumentError: `size_bytes` is negative.
    """

    collective: Collective
    size_bytes: int
    accumulation: Accumulation = Accumulation.SAME
    root: int = 0
    wire: Wire = Wire.NONE

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ArgumentError(f"size_bytes={self.size_bytes}: want a number >= 0")


def cheapest(task: Task, topology: Topology) -> Plan:
    """Return the plan with the lowest price.

    If several prices are equal to three digits, return the first of their plans in `ranked`.

    Raises:
        ScheduleError: the root is not a rank; or the root is not 0, and the collective is not a broadcast.
    """
    return ranked(task, topology, 1)[0]


def ranked(task: Task, topology: Topology, most: int | None = None) -> list[Plan]:
    """Return the `most` cheapest plans for `task`, or all, the cheapest first; see `cheapest`."""
    bounds: list[tuple[float, int, Schedule, int | None]] = []
    schedules, cuts = _offers(task, topology)
    counts = [_count(task, cut) for cut in cuts]
    for schedule in schedules:
        at_least = least(schedule, task.size_bytes, ways_of(schedule, topology), counts)
        for at_least_s, cut in zip(at_least, cuts, strict=True):
            bounds.append((_known(at_least_s), len(bounds), schedule, cut))
    best: list[tuple[float, int, Plan]] = []
    most = len(bounds) if most is None else most
    for at_least_s, place, schedule, cut in sorted(bounds, key=itemgetter(0, 1)):
        if len(best) >= most and at_least_s > best[most - 1][0]:
            break
        plan = _priced(task, topology, schedule, cut)
        insort(best, (_known(plan.predicted_seconds), place, plan))
    return [plan for _, _, plan in best[:most]]


def count_of_plans(task: Task, topology: Topology) -> int:
    """Return the number of plans that `ranked` compares."""
    schedules, cuts = _offers(task, topology)
    return len(schedules) * len(cuts)


def _known(seconds: float) -> float:
    """Return `seconds` rounded to three digits, the accuracy of a price."""
    return float(f"{seconds:.3g}")


def repriced(task: Task, plan: Plan, topology: Topology) -> float:
    """Return the predicted seconds of `plan` for `task` on `topology`.

    The plan may have been made for another task or topology.
    """
    return _priced(task, topology, plan.schedule, plan.segment_bytes).predicted_seconds


def refuse_unfit(plan: Plan, task: Task, topology: Topology) -> None:
    """Raise ScheduleError unless the schedule of `plan` fits `task` and `topology`.

    The proof of a schedule shows that it keeps its own promise. This function checks that the promise is the task's.
    """
    schedule, asked = plan.schedule, f"{task.collective.value} of {task.size_bytes} bytes"
    if schedule.collective is not task.collective or schedule.ranks != topology.ranks:
        raise ScheduleError(f"{plan}, for {asked}: want {task.collective.value} on {topology.ranks} ranks")
    if schedule.root != task.root:
        raise ScheduleError(f"{plan}, for {asked}: want root {task.root}, got {schedule.root}")
    if schedule.accumulation < task.accumulation:
        got, want = schedule.accumulation.name.lower(), task.accumulation.name.lower()
        raise ScheduleError(f"{plan}, for {asked}: want {want} accumulation, got {got}")
    wires = wires_of(schedule.grid, schedule.order, topology, task.wire) or (Wire.NONE,) * len(schedule.grid)
    if schedule.wires != wires:
        raise ScheduleError(f"{plan}, for {asked}: want wires {names_of(wires)}, got {names_of(schedule.wires)}")


def _offers(task: Task, topology: Topology) -> tuple[tuple[Schedule, ...], tuple[int | None, ...]]:
    """Return the schedules and the segment lengths to compare, each with each."""
    cuts = segments_of(task.collective, topology, task.size_bytes, task.wire)
    return candidates(task.collective, topology, task.accumulation, task.root, task.wire), cuts


def _priced(task: Task, topology: Topology, schedule: Schedule, segment_bytes: int | None) -> Plan:
    ways = ways_of(schedule, topology)
    seconds = price(schedule, task.size_bytes, ways, _count(task, segment_bytes))
    seconds += _before_moves_s(task, topology, schedule, segment_bytes)
    return Plan(schedule, engine_of(topology), seconds, segment_bytes)


def _before_moves_s(task: Task, topology: Topology, schedule: Schedule, segment_bytes: int | None) -> float:
    """Return the part of a plan's predicted time that passes before its moves: agreement, and cutting the buffer."""
    seconds = 0.0
    is_noted = schedule.algorithm == "exchange" and not schedule.frame.joined
    if not is_noted or task.size_bytes > NOTES_BYTES or segment_bytes is not None:
        seconds += _agreement_s(topology)
    if _count(task, segment_bytes) > 1 and len(topology.hosts) > 1:
        seconds += _CUT_MESSAGES * topology.rails[0].overhead_s
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedOperation:
    """The cheapest plan of a task as it runs beside other operations.

    The moves start `before_moves_s` after the operation does. `seconds` is the predicted time if nothing else is in
    flight. The other fields are the arguments of `price`.
    """

    schedule: Schedule
    size_bytes: int
    ways: tuple[Way, ...]
    segments: int
    before_moves_s: float
    seconds: float


def planned_operation(task: Task, topology: Topology) -> PlannedOperation:
    """Return the cheapest plan for `task`, with what is needed to time it beside other operations."""
    plan = cheapest(task, topology)
    return PlannedOperation(
        schedule=plan.schedule,
        size_bytes=task.size_bytes,
        ways=ways_of(plan.schedule, topology),
        segments=_count(task, plan.segment_bytes),
        before_moves_s=_before_moves_s(task, topology, plan.schedule, plan.segment_bytes),
        seconds=plan.predicted_seconds,
    )


@lru_cache(maxsize=256)
def _agreement_s(topology: Topology) -> float:
    """Return the seconds in which ranks of several hosts agree on an operation: one message per round.

    A small exchange travels with the agreement and does not pay this. Within one host the agreement costs nothing
    extra, or costs the same for all plans, so the result is 0.
    """
    if len(topology.hosts) == 1:
        return 0.0
    grid, _ = grid_of(topology)
    stays = len(grid) > 1 and grid[0] == len(topology.hosts[0])  # whether the first axis is within hosts
    links = [topology.shm if stays and axis == 0 else topology.rails[0] for axis in range(len(grid))]
    return sum(
        math.ceil(math.log2(size)) * (link.latency_s + link.overhead_s) for size, link in zip(grid, links, strict=True)
    )


def _count(task: Task, segment_bytes: int | None) -> int:
    return 1 if segment_bytes is None else max(1, -(-task.size_bytes // segment_bytes))


def engine_of(topology: Topology) -> str:
    """Return the native core's engine for `topology`: "shm", "tcp", or both, chosen for each pair of ranks."""
    if len(topology.hosts) == 1:
        return "shm"
    return "tcp" if len(topology.hosts) == topology.ranks else "shm+tcp"
