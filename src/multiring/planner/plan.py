"""The choice, by price alone: every rank comes to the same plan."""

from dataclasses import dataclass

from multiring.errors import ArgumentError
from multiring.planner.candidates import candidates, segments_of
from multiring.planner.ways import ways_of
from multiring.schedule import Accumulation, Collective, Schedule, least, price
from multiring.topology import Topology


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, what carries its bytes, and what it is expected to take."""

    schedule: Schedule
    engine: str  # "shm", "tcp", or "shm+tcp": by pair, whether they share a host
    predicted_seconds: float
    segment_bytes: int | None = None  # of the pieces that go through the schedule side by side; None: the whole buffer

    def __str__(self) -> str:
        cut = "" if self.segment_bytes is None else f", segments of {self.segment_bytes >> 10} KiB"
        return f"{self.schedule}{cut}, by {self.engine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a plan is for.

    `size_bytes` is the whole buffer, the longer side: all ranks' blocks. `accumulation` is what the sum needs; see
    `accumulation_of`. `root` is the rank that broadcasts.

    Raises:
        ArgumentError: `size_bytes` is negative.
    """

    collective: Collective
    size_bytes: int
    accumulation: Accumulation = Accumulation.SAME
    root: int = 0

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ArgumentError(f"size_bytes={self.size_bytes}: want a number >= 0")


def cheapest(task: Task, topology: Topology) -> Plan:
    """Return the plan with the lowest price; among equals the first of `ranked`.

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
        if at_least_s > best.predicted_seconds:
            break
        plan = _priced(task, topology, schedule, cut)
        if (plan.predicted_seconds, place) < (best.predicted_seconds, best_place):
            best, best_place = plan, place
    return best


def choose(
    collective: Collective, topology: Topology, size_bytes: int, accumulation: Accumulation, root: int = 0
) -> Plan:
    """Return the cheapest plan; see `Task`."""
    task = Task(collective=collective, size_bytes=size_bytes, accumulation=accumulation, root=root)
    return cheapest(task, topology)


def ranked(task: Task, topology: Topology) -> list[Plan]:
    """Return all plans there are, cheapest first; see `cheapest`."""
    plans = [_priced(task, topology, schedule, cut) for schedule, cut in _offers(task, topology)]
    return sorted(plans, key=lambda plan: plan.predicted_seconds)


def _offers(task: Task, topology: Topology) -> list[tuple[Schedule, int | None]]:
    cuts = segments_of(task.collective, topology, task.size_bytes)
    schedules = candidates(task.collective, topology, task.accumulation, task.root)
    return [(schedule, cut) for schedule in schedules for cut in cuts]


def _priced(task: Task, topology: Topology, schedule: Schedule, segment_bytes: int | None) -> Plan:
    ways = ways_of(schedule, topology)
    seconds = price(schedule, task.size_bytes, ways, _count(task, segment_bytes))
    return Plan(schedule, _engine_of(topology), seconds, segment_bytes)


def _count(task: Task, segment_bytes: int | None) -> int:
    return 1 if segment_bytes is None else max(1, -(-task.size_bytes // segment_bytes))


def _engine_of(topology: Topology) -> str:
    if len(topology.hosts) == 1:
        return "shm"
    return "tcp" if len(topology.hosts) == topology.ranks else "shm+tcp"
