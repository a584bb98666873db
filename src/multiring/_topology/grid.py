"""Lay out the ranks of a topology on a grid, fastest links first, independent of the launcher's rank order.

A grid (p1, ..., pk) has p1 * ... * pk positions. Position i1 + p1 * (i2 + p2 * (i3 + ...)) has the
coordinates (i1, ..., ik), and `order` has the rank at each position.
"""

import math
from collections.abc import Sequence

from multiring._topology.model import Topology
from multiring.errors import ArgumentError

# Up to this many ranks one axis is as fast as two: a rank can read from 15 peers at once.
_FLAT_MOST = 16


def grid_of(topology: Topology) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (grid, order) for `topology`.

    Hosts of equal size in racks of equal size become the grid (ranks of a host, hosts of a rack, racks), without axes
    of length 1. If racks have unequal size, the grid is (ranks of a host, hosts), rack after rack. A single axis of
    more than 16 ranks is split into its two most equal factors, the larger first; a prime stays one axis. Hosts of
    unequal size become one axis, host after host.
    """
    order = tuple(rank for host in hosts_by_rack(topology) for rank in topology.hosts[host])
    local, hosts = len(topology.hosts[0]), len(topology.hosts)
    if any(len(host) != local for host in topology.hosts):
        return (len(order),), order
    beside = len(topology.racks[0].hosts) if topology.racks else hosts
    if any(len(rack.hosts) != beside for rack in topology.racks):
        beside = hosts
    axes = tuple(size for size in (local, beside, hosts // beside) if size > 1)
    return (axes if len(axes) > 1 else _near_square(len(order))), order


def hosts_by_rack(topology: Topology) -> tuple[int, ...]:
    """Return the indices of all hosts, rack by rack."""
    if not topology.racks:
        return tuple(range(len(topology.hosts)))
    return tuple(host for rack in topology.racks for host in rack.hosts)


def _near_square(ranks: int) -> tuple[int, ...]:
    if ranks <= _FLAT_MOST:
        return (ranks,)
    small = next(factor for factor in range(math.isqrt(ranks), 0, -1) if ranks % factor == 0)
    return (ranks,) if small == 1 else (ranks // small, small)


def strides_of(grid: Sequence[int]) -> tuple[int, ...]:
    """Return the distance in positions between two neighbours along each axis."""
    return tuple(math.prod(grid[:axis]) for axis in range(len(grid)))


def coordinates_of(grid: Sequence[int], position: int) -> tuple[int, ...]:
    """Return the coordinates of `position`, fastest axis first."""
    return tuple(position // stride % size for stride, size in zip(strides_of(grid), grid, strict=True))


def neighbours(grid: Sequence[int], order: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the neighbours of `rank` along each axis (cyclic): each rank once, in ascending order.

    Raises:
        ArgumentError: `rank` is not in `order`, or `order` does not fill `grid`.
    """
    if rank not in order or len(order) != math.prod(grid):
        raise ArgumentError(f"rank {rank} on grid {tuple(grid)} with {len(order)} ranks: want one rank per position")
    position = order.index(rank)
    found: set[int] = set()
    for stride, size, at in zip(strides_of(grid), grid, coordinates_of(grid, position), strict=True):
        found.update(order[position + ((at + step) % size - at) * stride] for step in (-1, 1))
    return tuple(sorted(found - {rank}))
