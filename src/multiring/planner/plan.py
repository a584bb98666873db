"""The choice among the algorithms and grids there are, by price alone: every rank comes to the same plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from multiring.collectives import algorithms_of, build
from multiring.errors import ArgumentError, ScheduleError
from multiring.schedule import SUMS, Accumulation, Collective, Frame, Kind, Moves, Schedule, price
from multiring.topology import Link, Topology, grid_of, strides_of

SEGMENTED = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST})  # whose buffer is one piece of memory
_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, what carries its bytes, and what it is expected to take."""

    schedule: Schedule
    engine: str  # "shm", "tcp", or "shm+tcp": by pair, whether they share a host
    predicted_seconds: float
    segment_bytes: int | None = None  # of the pieces that go through the schedule side by side; None: the whole buffer


def choose(
    collective: Collective, topology: Topology, size_bytes: int, accumulation: Accumulation, root: int = 0
) -> Plan:
    """Return the plan with the lowest price; among equals the one that the table of algorithms has first.

    Args:
        collective: what the ranks do.
        topology: where they are.
        size_bytes: the whole buffer, the longer side: all ranks' blocks.
        accumulation: what the sum needs; see `accumulation_of`.
        root: the rank that broadcasts.

    Raises:
        ArgumentError: `size_bytes` is negative.
        ScheduleError: `root` is not a rank, or is not 0 where nobody broadcasts.
    """
    if size_bytes < 0:
        raise ArgumentError(f"size_bytes={size_bytes}: want a number >= 0")
    engine = _engine_of(topology)
    plans = [
        Plan(schedule, engine, price(schedule, size_bytes, links_of(schedule, topology)), _segment_of(schedule, engine))
        for schedule in candidates(collective, topology, accumulation, root)
    ]
    return min(plans, key=lambda plan: plan.predicted_seconds)


def candidates(
    collective: Collective, topology: Topology, accumulation: Accumulation, root: int = 0
) -> Iterator[Schedule]:
    """Yield what the table has for `collective`, on one axis and on the topology's grid."""
    grid, order = grid_of(topology)
    frame = Frame(collective=collective, grid=(topology.ranks,), order=order, root=root)
    flat_only = collective in SUMS and accumulation is Accumulation.ONCE
    grids = [frame.grid] if grid == frame.grid or flat_only else [frame.grid, grid]
    for algorithm in algorithms_of(collective):
        for each in grids:
            try:
                schedule = build(algorithm, replace(frame, grid=each), accumulation)
            except ScheduleError:  # refuses this accumulation
                continue
            if schedule.grid == each:
                yield schedule


def _segment_of(schedule: Schedule, engine: str) -> int | None:
    """Return how long the pieces are that a buffer between hosts is cut into; memory within one is not worth it."""
    return _SEGMENT_BYTES if engine != "shm" and schedule.collective in SEGMENTED else None


def _engine_of(topology: Topology) -> str:
    if len(topology.hosts) == 1:
        return "shm"
    return "tcp" if len(topology.hosts) == topology.ranks else "shm+tcp"


def links_of(schedule: Schedule, topology: Topology) -> list[Link]:
    """Return the link of each axis: the slowest on its lines, and the part of it that one rank gets.

    A host's ranks share its way out: as many as send to another host along that axis.
    """
    if len(topology.hosts) == 1:
        return [topology.shm] * len(schedule.grid)
    host_of = np.asarray(topology.host_of())
    links = []
    for axis in range(len(schedule.grid)):
        sharers = _sharers(schedule, axis, host_of)
        rail = topology.rails[0]
        part = replace(rail, bandwidth_bytes_per_s=rail.bandwidth_bytes_per_s / max(sharers, 1))
        links.append(part if sharers else topology.shm)
    return links


def _sharers(schedule: Schedule, axis: int, host_of: NDArray[np.intp]) -> int:
    """Return how many ranks of one host send to other hosts along `axis`, at most."""
    size, patterns = schedule.grid[axis], [phase.pattern for phase in schedule.phases if phase.axis == axis]
    hosts = host_of[np.asarray(schedule.order)[_busy_lines(schedule, axis)]]
    leaving = np.zeros(len(host_of), np.intp)
    for at in range(size):
        programs = [pattern.program(size, at) for pattern in patterns]
        receivers = np.unique(np.concatenate([_receivers(program) for program in programs]))
        crosses = (hosts[:, receivers] != hosts[:, [at]]).any(axis=1)
        np.add.at(leaving, hosts[crosses, at], 1)
    return int(leaving.max())


def _busy_lines(schedule: Schedule, axis: int) -> NDArray[np.intp]:
    """Return the grid positions on the lines along `axis` that take part: shape (lines, grid[axis])."""
    grid, size = schedule.grid, schedule.grid[axis]
    # Position numbers count the first axis fastest, an array its last.
    positions = np.arange(schedule.ranks).reshape(grid[::-1])
    lines = np.moveaxis(positions, len(grid) - 1 - axis, -1).reshape(-1, size)
    if schedule.collective is not Collective.BROADCAST:
        return lines
    # Only lines beside the root's have something to send, and a pattern's coordinate 0 is the root's.
    root = schedule.frame.coordinates_of(schedule.root)
    strides = strides_of(grid)
    busy = [all(int(line[0]) // strides[a] % grid[a] == root[a] for a in range(axis)) for line in lines]
    return np.roll(lines[busy], -root[axis], axis=1)


def _receivers(program: Moves) -> NDArray[np.int32]:
    return program.take(np.flatnonzero(program.kind == Kind.SEND)).peers
