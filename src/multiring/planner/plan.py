"""The choice, by price alone: every rank comes to the same plan."""

import math
from dataclasses import dataclass
from functools import lru_cache

from multiring.errors import ArgumentError, ScheduleError
from multiring.planner.candidates import candidates, segments_of, wires_of
from multiring.planner.ways import ways_of
from multiring.schedule import Accumulation, Collective, Schedule, Wire, least, names_of, price
from multiring.topology import Topology, grid_of

NOTES_BYTES = 64 << 10  # so much of an exchange travels with the agreement; the native core's NOTE_BYTES
# What cutting a buffer costs by itself: until the stream is full its ranks wake up for each piece. 2 hosts x 1 without
# a limit, 512 KiB: two pieces took 100 to 180 us longer than priced, and a message 37 us (docs/decisions/0011).
_CUT_MESSAGES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, what carries its bytes, and what it is expected to take."""

    schedule: Schedule
    engine: str  # "shm", "tcp", "mpi", or "shm+tcp", "shm+mpi": by pair, whether they share a host; or another's name
    predicted_seconds: float
    segment_bytes: int | None = None  # of the pieces that go through the schedule side by side; None: the whole buffer

    @property
    def wire(self) -> Wire:
        """The wire type of the axes that are coded; they cross hosts."""
        return max(self.schedule.wires)

    def __str__(self) -> str:
        cut = "" if self.segment_bytes is None else f", segments of {self.segment_bytes >> 10} KiB"
        return f"{self.schedule}{cut}, by {self.engine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a plan is for.

    `size_bytes` is the whole buffer, the longer side: all ranks' blocks. `accumulation` is what the sum needs; see
    `accumulation_of`. `root` is the rank that broadcasts. `wire` is how what crosses hosts is coded.

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
    """Return the plan with the lowest price; among equals, which differ by less than is known, the first of `ranked`.

    Raises:
        ScheduleError: the root is not a rank, or is not 0 where nobody broadcasts.
    """
    offers = [
        (least(each, task.size_bytes, ways_of(each, topology), _count(task, cut)), place, each, cut)
        for place, (each, cut) in enumerate(_offers(task, topology))
    ]
    (_, best_place, schedule, cut), *others = sorted(offers, key=lambda offer: offer[:2])
    best = _priced(task, topology, schedule, cut)
    for at_least_s, place, schedule, cut in others:
        if _known(at_least_s) > _known(best.predicted_seconds):
            break
        plan = _priced(task, topology, schedule, cut)
        if (_known(plan.predicted_seconds), place) < (_known(best.predicted_seconds), best_place):
            best, best_place = plan, place
    return best


def ranked(task: Task, topology: Topology) -> list[Plan]:
    """Return all plans there are, cheapest first; see `cheapest`."""
    plans = [_priced(task, topology, schedule, cut) for schedule, cut in _offers(task, topology)]
    return sorted(plans, key=lambda plan: _known(plan.predicted_seconds))


def _known(seconds: float) -> float:
    """Return `seconds` to as many digits as a price is known by; among equals short pieces come first."""
    return float(f"{seconds:.3g}")


def repriced(task: Task, plan: Plan, topology: Topology) -> float:
    """Return the seconds that `plan` is predicted to take for `task` on `topology`, whatever it was made for."""
    return _priced(task, topology, plan.schedule, plan.segment_bytes).predicted_seconds


def refuse_unfit(plan: Plan, task: Task, topology: Topology) -> None:
    """Raise ScheduleError unless the schedule of `plan`, right as it may be by itself, is one for `task` here.

    A proof is of what the schedule promises; whether that is what was asked for, nobody else looks at.
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


def _offers(task: Task, topology: Topology) -> list[tuple[Schedule, int | None]]:
    cuts = segments_of(task.collective, topology, task.size_bytes, task.wire)
    schedules = candidates(task.collective, topology, task.accumulation, task.root, task.wire)
    return [(schedule, cut) for schedule in schedules for cut in cuts]


def _priced(task: Task, topology: Topology, schedule: Schedule, segment_bytes: int | None) -> Plan:
    ways = ways_of(schedule, topology)
    seconds = price(schedule, task.size_bytes, ways, _count(task, segment_bytes))
    is_noted = schedule.algorithm == "exchange" and not schedule.frame.joined
    if not is_noted or task.size_bytes > NOTES_BYTES or segment_bytes is not None:
        seconds += _agreement_s(topology)
    if _count(task, segment_bytes) > 1 and len(topology.hosts) > 1:
        seconds += _CUT_MESSAGES * topology.rails[0].overhead_s
    return Plan(schedule, engine_of(topology), seconds, segment_bytes)


@lru_cache(maxsize=256)
def _agreement_s(topology: Topology) -> float:
    """Return how long ranks of several hosts take to agree on an operation: in each round all hear from one more.

    A small exchange travels with the agreement. Within a host everything does, or it is the same for all plans.
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
    """Return what carries bytes between ranks by the native core: "shm", "tcp" or, by pair, both."""
    if len(topology.hosts) == 1:
        return "shm"
    return "tcp" if len(topology.hosts) == topology.ranks else "shm+tcp"
