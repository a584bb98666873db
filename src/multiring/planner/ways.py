"""The links that each axis of a schedule passes on a topology, and the part of them that one rank gets.

The ranks of a host that send along the axis share the host's rails. The ranks of a rack that send along the axis share
the rack's uplinks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from multiring._schedule import Collective, Frame, Kind, Pattern, Schedule, Way
from multiring._topology import Link, Topology, strides_of

SHM_PORT, RAILS_PORT = 0, 1  # the ports of a rank
# The factor on a rail's bandwidth if several hosts send to one host at a time and overflow its queues. Measured on
# 4 hosts at 1 Gbit/s, 16 and 32 MiB: direct took 3 to 12 % longer than rings (docs/decisions/0011).
_CROWDED = 0.94
# The same factor if the wire is processors on which ranks take turns. Measured on 4 hosts x 2 ranks on two cores, no
# rate limit, 512 KiB in one piece: direct took 4.2 to 6.4 ms, a ring 2.0 ms.
_CROWDED_BY_TURNS = 0.6


@lru_cache(maxsize=1024)
def ways_of(schedule: Schedule, topology: Topology) -> tuple[Way, ...]:
    """Return the Way of each axis of `schedule`, and a last Way for joining ranks, if there are any.

    All axes that cross hosts share one port: the rails, on which channels run side by side. A joining rank is always on
    its partner's host.
    """
    if len(topology.hosts) == 1:
        return (Way(link=topology.shm, port=SHM_PORT),) * len(schedule.grid)
    joining = (Way(link=topology.shm, port=SHM_PORT),) if schedule.frame.joined else ()
    return (*(_way(schedule, topology, axis) for axis in range(len(schedule.grid))), *joining)


def _way(schedule: Schedule, topology: Topology, axis: int) -> Way:
    patterns = tuple(phase.pattern for phase in schedule.phases if phase.axis == axis)
    # The shares do not matter here. Without them, more schedules share a cached result.
    frame = replace(schedule.frame, shares=(1,))
    from_hosts, within_hosts, from_racks = _senders(frame, patterns, axis, topology.hosts, topology.rack_of())
    if not any(from_hosts):
        return Way(link=topology.shm, port=SHM_PORT)
    crowded = _CROWDED_BY_TURNS if topology.takes_turns else _CROWDED
    left = crowded if _is_crowded(patterns, schedule.grid[axis]) else 1.0
    own = {each.host: each.rails for each in topology.own_rails}
    # Hosts with equal rails and equally many senders are priced once: there may be thousands.
    alike = dict.fromkeys(
        (host if host in own else None, senders, within, len(topology.hosts[host]))
        for host, (senders, within) in enumerate(zip(from_hosts, within_hosts, strict=True))
        if senders
    )
    each_host = [
        _beside(
            _side_by_side(topology.rails if host is None else own[host], schedule.shares, senders),
            topology,
            within,
            ranks,
        )
        for host, senders, within, ranks in alike
    ]
    slowest = min(each_host, key=lambda found: found.bandwidth_bytes_per_s)
    link = replace(slowest, bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s * left)
    uplinks = [
        _side_by_side(rack.uplinks, schedule.shares, senders)
        for rack, senders in zip(topology.racks, from_racks, strict=False)
        if senders and any(rack.uplinks)
    ]
    if not uplinks:
        return Way(link=link, port=RAILS_PORT)
    narrowest = min(uplinks, key=lambda found: found.bandwidth_bytes_per_s)
    further_s = max(found.latency_s for found in uplinks)
    return Way(
        link=replace(link, latency_s=link.latency_s + further_s),
        port=RAILS_PORT,
        uplink_bytes_per_s=narrowest.bandwidth_bytes_per_s * left,
    )


def _side_by_side(links: Sequence[Link | None], shares: Sequence[int], senders: int) -> Link:
    """Return one link that is equivalent to `links` for one of `senders` ranks, whose channels carry `shares`.

    Channel c uses link c. Each message is sent as one message per channel, one after the other.
    """
    used = [(links[channel % len(links)], share / sum(shares)) for channel, share in enumerate(shares)]
    known = [(link, part) for link, part in used if link is not None]
    if not known:
        return Link(latency_s=0, overhead_s=0, bandwidth_bytes_per_s=np.inf, reduce_bytes_per_s=np.inf)
    return Link(
        latency_s=max(link.latency_s for link, _ in known),
        overhead_s=sum(link.overhead_s for link, _ in known),
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s / part for link, part in known) / senders,
        reduce_bytes_per_s=min(link.reduce_bytes_per_s for link, _ in known),
    )


def _beside(link: Link, topology: Topology, within: int, ranks: int) -> Link:
    """Return `link` with less bandwidth if ranks take turns, and `within` of its host's ranks send within the host."""
    if not topology.takes_turns:
        return link
    # The stated rate is per rank: all ranks of a host use the memory of the host side by side.
    memory_bytes_per_s = topology.shm.bandwidth_bytes_per_s * ranks
    seconds_a_byte = 1 / link.bandwidth_bytes_per_s + within / memory_bytes_per_s
    return replace(link, bandwidth_bytes_per_s=1 / seconds_a_byte)


@lru_cache(maxsize=1024)
def _senders(
    frame: Frame,
    patterns: tuple[Pattern, ...],
    axis: int,
    hosts: tuple[tuple[int, ...], ...],
    rack_of: tuple[int, ...],
) -> tuple[list[int], list[int], list[int]]:
    """Count the ranks that send along `axis`.

    Returns:
        For each host, the ranks that send to other hosts; for each host, the ranks that send within the host only; for
        each rack, the ranks that send to other racks.
    """
    host_of = np.zeros(frame.ranks, np.intp)
    for index, ranks in enumerate(hosts):
        host_of[list(ranks)] = index
    hosts_on = host_of[np.asarray(frame.order)[_busy_lines(frame, axis)]]
    racks_on = np.asarray(rack_of)[hosts_on]
    size = frame.grid[axis]
    if frame.collective is Collective.BROADCAST:
        receivers = [_receivers(patterns, size, at) for at in range(size)]
        sends = np.array([len(each) > 0 for each in receivers])
        leaves_host, leaves_rack = (_crossing_from_root(places, receivers) for places in (hosts_on, racks_on))
    else:
        # All ranks of a line have the same moves up to a rotation, as `price` assumes.
        offsets = _receivers(patterns, size, 0)
        sends = np.full(size, len(offsets) > 0)
        leaves_host, leaves_rack = (_crossing(places, offsets.tolist()) for places in (hosts_on, racks_on))
    from_hosts = np.bincount(hosts_on[leaves_host], minlength=len(hosts))
    from_racks = np.bincount(racks_on[leaves_rack], minlength=max(rack_of) + 1)
    all_senders = np.bincount(hosts_on[:, sends].ravel(), minlength=len(hosts))
    return from_hosts.tolist(), (all_senders - from_hosts).tolist(), from_racks.tolist()


def _crossing(places: NDArray[np.intp], offsets: Iterable[int]) -> NDArray[np.bool_]:
    """Return whether each rank sends to another place: shape (lines, size), like `places`.

    Every rank of a line sends to the ranks at `offsets` from it.
    """
    size = places.shape[1]
    found = np.zeros(places.shape, np.bool_)
    mixed = (places != places[:, :1]).any(axis=1)
    on_mixed, crosses = places[mixed], found[mixed]
    # The farthest ranks are most likely in another place, so that few of many offsets decide.
    for offset in sorted(offsets, key=lambda each: -min(each, size - each)):
        if crosses.all():
            break
        crosses |= on_mixed != np.roll(on_mixed, -offset, axis=1)
    found[mixed] = crosses
    return found


def _crossing_from_root(places: NDArray[np.intp], receivers: Sequence[NDArray[np.int32]]) -> NDArray[np.bool_]:
    """Return the same for a broadcast, in which each coordinate has its own receivers."""
    columns = [(places[:, those] != places[:, [at]]).any(axis=1) for at, those in enumerate(receivers)]
    return np.stack(columns, axis=1)


@lru_cache(maxsize=256)
def _is_crowded(patterns: tuple[Pattern, ...], size: int) -> bool:
    """Return whether a rank of a line receives from several ranks in a phase; it checks coordinates 0 and 1 only."""
    for pattern in patterns:
        for at in range(min(size, 2)):
            program = pattern.program(size, at)
            sources = program.take(np.flatnonzero(program.kind != Kind.SEND)).peers
            if len(np.unique(sources[sources != at])) > 1:
                return True
    return False


def _busy_lines(frame: Frame, axis: int) -> NDArray[np.intp]:
    """Return the grid positions on the lines along `axis` that have messages: shape (lines, grid[axis])."""
    grid, size = frame.grid, frame.grid[axis]
    # Grid positions count the first axis fastest; a numpy array counts its last axis fastest.
    positions = np.arange(frame.blocks).reshape(grid[::-1])
    lines = np.moveaxis(positions, len(grid) - 1 - axis, -1).reshape(-1, size)
    if frame.collective is not Collective.BROADCAST:
        return lines
    # Only lines through ranks that already have the root's data send. A pattern's coordinate 0 is the root.
    root = frame.coordinates_of(frame.root)
    strides = strides_of(grid)
    busy = [all(int(line[0]) // strides[a] % grid[a] == root[a] for a in range(axis)) for line in lines]
    return np.roll(lines[busy], -root[axis], axis=1)


def _receivers(patterns: Sequence[Pattern], size: int, at: int) -> NDArray[np.int32]:
    """Return the coordinates to which coordinate `at` of a line sends, each once."""
    programs = [pattern.program(size, at) for pattern in patterns]
    sent = [program.take(np.flatnonzero(program.kind == Kind.SEND)).peers for program in programs]
    return np.unique(np.concatenate(sent))
