"""List the candidates of the planner: every algorithm on every grid and set of channels that fits the topology."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from multiring._collectives import algorithms_of, build
from multiring._schedule import SUMS, Accumulation, Collective, Frame, Phase, Schedule, Wire, encoded_bytes
from multiring._topology import Link, Topology, grid_of
from multiring.errors import ScheduleError

SEGMENTED = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST})  # collectives whose buffer is one piece of memory
# 128 KiB to 4 MiB on the wire. In shorter segments each rank's part is so few packets that overhead dominates.
_SEGMENTS_BYTES = tuple(1 << bits for bits in range(17, 23))
_BROADCAST_SEGMENTS_BYTES = (1 << 18, 1 << 20)  # few hosts, because the price of each grid needs all ranks of a line
_FLAT_MOST = 16  # the most hosts on one axis before two axes are tried as well
_FINEST = 64  # the largest sum of the shares, unless a rail has less than 1/64 of the bandwidth
_CLOSE = 0.02  # the largest accepted error of shares against bandwidths


@lru_cache(maxsize=256)
def candidates(
    collective: Collective,
    topology: Topology,
    accumulation: Accumulation,
    root: int = 0,
    wire: Wire = Wire.NONE,
) -> tuple[Schedule, ...]:
    """Return the distinct schedules for `collective`, on each grid, on one rail and on all rails.

    `wire` is the wire type of the axes that cross hosts.

    Raises:
        ScheduleError: `root` is not a rank; or `root` is not 0, and the collective is not a broadcast.
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
        except ScheduleError:  # the algorithm rejects this accumulation or wire type
            continue
        if schedule.grid == frame.grid:
            kinds = map(partial(_kind_of, frame.grid), schedule.phases)
            found.setdefault((frame.grid, frame.joined, shares, *kinds), schedule)
    return tuple(found.values())


def _kind_of(grid: tuple[int, ...], phase: Phase) -> tuple[object, ...]:
    """Return a key that is equal for equal phases: on an axis of two ranks, rings and direct patterns are equal."""
    size = grid[phase.axis]
    if size > 2:
        return phase.axis, phase.pattern
    # With two operands the order does not change the result.
    programs = [
        [(*row[:-2], *sorted(row.peers), row.wire) for row in phase.pattern.program(size, at).rows()]
        for at in range(size)
    ]
    return phase.axis, *map(tuple, programs)


@lru_cache(maxsize=256)
def wires_of(grid: tuple[int, ...], order: tuple[int, ...], topology: Topology, wire: Wire) -> tuple[Wire, ...]:
    """Return the wire type of each axis: `wire` if a line of the axis crosses hosts.

    The result is empty if no axis crosses hosts.
    """
    if not wire:
        return ()
    # Grid positions count the first axis fastest; a numpy array counts its last axis fastest.
    hosts = np.asarray(topology.host_of())[list(order)].reshape(grid[::-1])
    crosses = [bool((np.diff(hosts, axis=len(grid) - 1 - axis) != 0).any()) for axis in range(len(grid))]
    return tuple(wire if each else Wire.NONE for each in crosses) if any(crosses) else ()


def segments_of(
    collective: Collective, topology: Topology, size_bytes: int, wire: Wire = Wire.NONE
) -> tuple[int | None, ...]:
    """Return the segment lengths to try for a buffer, in bytes, shortest first.

    The last entry is None: the whole buffer. With a lossy `wire` the segments are longer by a power of two, so that
    their encoded size stays about the same. Buffers within one host are not cut, because it does not pay. If ranks take
    turns on processors, segments have nothing to overlap with, so buffers are not cut either.
    """
    if len(topology.hosts) == 1 or collective not in SEGMENTED or topology.takes_turns:
        return (None,)
    lengths = _SEGMENTS_BYTES if collective is Collective.ALL_REDUCE else _BROADCAST_SEGMENTS_BYTES
    longer = round(4 * 1024 / encoded_bytes(wire, 1024))
    return (*(length * longer for length in lengths if length * longer < size_bytes), None)


@lru_cache(maxsize=256)
def grids_of(topology: Topology) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the grids to try, the grid of one axis first, and the rank order that all of them share.

    The grids are: one axis through all ranks, host after host, rack after rack; (ranks of a host, hosts); (ranks of a
    host, hosts of a rack, racks); and, for many hosts, the hosts as two axes.
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
    """Return the frames of an all_reduce on hosts of unequal size.

    The list is empty if all hosts have equal size.
    The smallest host's number of ranks is taken from every host, and these ranks form the grids. The other ranks join
    the ranks of their host in turn.
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
    """Return the channel weights to try: all on the first rail, and over all rails in proportion to bandwidth."""
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
    """Return small positive integers in proportion to `bandwidths`, to 2 % unless they are very unequal."""
    whole = sum(bandwidths)
    best, error = (1,) * len(bandwidths), math.inf
    for total in range(len(bandwidths), _FINEST + 1):
        shares = tuple(max(1, round(total * each / whole)) for each in bandwidths)
        # The rail with the largest excess decides, because it finishes last.
        worst = max(share / sum(shares) * whole / each - 1 for share, each in zip(shares, bandwidths, strict=True))
        if worst < error - 1e-12:
            best, error = shares, worst
        if error <= _CLOSE:
            break
    return best


def _bandwidth(link: Link | None) -> float:
    return math.inf if link is None else link.bandwidth_bytes_per_s
