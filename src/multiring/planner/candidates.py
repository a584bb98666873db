"""What there is to choose from: every algorithm of the table, on every grid and all channels that fit the topology."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from multiring.collectives import algorithms_of, build
from multiring.errors import ScheduleError
from multiring.schedule import SUMS, Accumulation, Collective, Frame, Phase, Schedule, Wire, encoded_bytes
from multiring.topology import Link, Topology, grid_of

SEGMENTED = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST})  # whose buffer is one piece of memory
# 128 KiB to 4 MiB on the wire: of shorter ones each rank's part is a few packets, which cost it more than the wire.
_SEGMENTS_BYTES = tuple(1 << bits for bits in range(17, 23))
_BROADCAST_SEGMENTS_BYTES = (1 << 18, 1 << 20)  # each is priced with all ranks of a line
_FLAT_MOST = 16  # hosts that one axis is long enough for
_FINEST = 64  # shares add up to no more, unless a rail is slower than that part of all
_CLOSE = 0.02  # shares differ from the bandwidths' proportion by so much at most, if they can


@lru_cache(maxsize=256)
def candidates(
    collective: Collective,
    topology: Topology,
    accumulation: Accumulation,
    root: int = 0,
    wire: Wire = Wire.NONE,
) -> tuple[Schedule, ...]:
    """Return what the table has for `collective`, on each grid, on one rail and on all; of equal ones the first.

    `wire` is the type of the axes that cross hosts.

    Raises:
        ScheduleError: `root` is not a rank, or is not 0 where nobody broadcasts.
    """
    grids, order = grids_of(topology)
    frames = [Frame(collective=collective, grid=grid, order=order, root=root) for grid in grids]
    if collective in SUMS and accumulation is Accumulation.ONCE:
        frames = frames[:1]
    elif collective is Collective.ALL_REDUCE:
        frames += joined_frames(topology)
    found: dict[tuple[object, ...], Schedule] = {}
    for algorithm, frame, shares in product(algorithms_of(collective), frames, shares_of(topology)):
        wires = wires_of(frame.grid, frame.order, topology, wire)
        try:
            schedule = build(algorithm, replace(frame, shares=shares, wires=wires), accumulation)
        except ScheduleError:  # refuses this accumulation or wire type
            continue
        if schedule.grid == frame.grid:
            kinds = map(partial(_kind_of, frame.grid), schedule.phases)
            found.setdefault((frame.grid, frame.joined, shares, *kinds), schedule)
    return tuple(found.values())


def _kind_of(grid: tuple[int, ...], phase: Phase) -> tuple[object, ...]:
    """Return what tells phases apart: on an axis of two ranks rings and direct patterns do the same."""
    size = grid[phase.axis]
    if size > 2:
        return phase.axis, phase.pattern
    # Of two operands it does not matter which comes first.
    programs = [
        [(*row[:-2], *sorted(row.peers), row.wire) for row in phase.pattern.program(size, at).rows()]
        for at in range(size)
    ]
    return phase.axis, *map(tuple, programs)


@lru_cache(maxsize=256)
def wires_of(grid: tuple[int, ...], order: tuple[int, ...], topology: Topology, wire: Wire) -> tuple[Wire, ...]:
    """Return the wire type of each axis: `wire` where some line of it has ranks of several hosts; empty for none."""
    if not wire:
        return ()
    # Position numbers count the first axis fastest, an array its last.
    hosts = np.asarray(topology.host_of())[list(order)].reshape(grid[::-1])
    crosses = [bool((np.diff(hosts, axis=len(grid) - 1 - axis) != 0).any()) for axis in range(len(grid))]
    return tuple(wire if each else Wire.NONE for each in crosses) if any(crosses) else ()


def segments_of(
    collective: Collective, topology: Topology, size_bytes: int, wire: Wire = Wire.NONE
) -> tuple[int | None, ...]:
    """Return how long the pieces may be that a buffer is cut into, shortest first; None: the whole.

    Those of a buffer that is coded are as much longer as coding makes them shorter, to a power of two. Within a host
    nothing is cut: its memory is not worth it. Nor is it where ranks take turns: pieces have nothing to overlap with.
    """
    if len(topology.hosts) == 1 or collective not in SEGMENTED or topology.takes_turns:
        return (None,)
    lengths = _SEGMENTS_BYTES if collective is Collective.ALL_REDUCE else _BROADCAST_SEGMENTS_BYTES
    longer = round(4 * 1024 / encoded_bytes(wire, 1024))
    return (*(length * longer for length in lengths if length * longer < size_bytes), None)


@lru_cache(maxsize=256)
def grids_of(topology: Topology) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the grids to try, one axis first, and the order that all of them share.

    One axis through all ranks, host after host, rack after rack; (ranks of a host, hosts); (ranks of a host, hosts of a
    rack, racks); and many hosts as two axes.
    """
    grid, order = grid_of(topology)
    grids = [(topology.ranks,), grid]
    local, hosts = len(topology.hosts[0]), len(topology.hosts)
    if all(len(host) == local for host in topology.hosts) and local > 1 and hosts > 1:
        grids.append((local, hosts))
        small = next(factor for factor in range(math.isqrt(hosts), 0, -1) if hosts % factor == 0)
        if hosts > _FLAT_MOST and small > 1:
            grids.append((local, hosts // small, small))
    return tuple(dict.fromkeys(grids)), order


def joined_frames(topology: Topology) -> list[Frame]:
    """Return the frames of an all_reduce on hosts of unequal size; none where all are equal.

    As many ranks of each host as all hosts have stand on the grids that these would have alone; the others join them,
    dealt out in turn.
    """
    least = min(map(len, topology.hosts))
    if len(topology.hosts) == 1 or all(len(host) == least for host in topology.hosts):
        return []
    standing = tuple(rank for host in topology.hosts for rank in host[:least])
    joined = tuple((rank, host[index % least]) for host in topology.hosts for index, rank in enumerate(host[least:]))
    grids, order = grids_of(topology.restricted(standing))
    placed = tuple(standing[position] for position in order)
    return [Frame(collective=Collective.ALL_REDUCE, grid=grid, order=placed, joined=joined) for grid in grids]


@lru_cache(maxsize=256)
def shares_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the channels' weights to try: all on the first rail, and over all rails as their bandwidths are."""
    rails = len(topology.rails)
    if len(topology.hosts) == 1 or rails == 1:
        return ((1,),)
    slowest = [min(topology.rails_of(host)[rail].bandwidth_bytes_per_s for host in range(len(topology.hosts)))
               for rail in range(rails)]  # fmt: skip
    found = [(1,), proportion(slowest)]
    narrowed = [rack.uplinks for rack in topology.racks if all(rack.uplinks) and rack.uplinks]
    if narrowed:
        found.append(proportion([min(_bandwidth(links[rail]) for links in narrowed) for rail in range(rails)]))
    return tuple(dict.fromkeys(found))


def proportion(bandwidths: Sequence[float]) -> tuple[int, ...]:
    """Return small positive integers in the proportion of `bandwidths`, to 2 % if those are not too unequal."""
    whole = sum(bandwidths)
    best, error = (1,) * len(bandwidths), math.inf
    for total in range(len(bandwidths), _FINEST + 1):
        shares = tuple(max(1, round(total * each / whole)) for each in bandwidths)
        # What is carried too much decides: it makes its rail the last to end.
        worst = max(share / sum(shares) * whole / each - 1 for share, each in zip(shares, bandwidths, strict=True))
        if worst < error - 1e-12:
            best, error = shares, worst
        if error <= _CLOSE:
            break
    return best


def _bandwidth(link: Link | None) -> float:
    return math.inf if link is None else link.bandwidth_bytes_per_s
