"""Price the messages along an axis of a mix on a topology, while all lines of the axis exchange the same messages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from multiring._schedule import Collective, Wire
from multiring._topology import Link, Topology, grid_of
from multiring.planner.parallelism.axes import Axis, Parallelism
from multiring.planner.plan import PlannedOperation, Task, planned_operation

_ROUND_BYTES = 64  # sizes are rounded up to multiples of this, so that similar sizes are priced once


class Prices:
    """Prices of one mix on one topology.

    Lines that leave a host share its rails; `each_s` is added to each price.
    """

    def __init__(self, parallelism: Parallelism, topology: Topology, each_s: float = 0.0) -> None:
        self._each_s = each_s
        _, order = grid_of(topology)
        self._lines = {axis: _slowest_lines(parallelism.lines(axis, order), topology) for axis, _ in parallelism.axes}
        # A lookup by topology takes longer the more ranks there are, so each mix keeps its own prices as well.
        self._known: dict[tuple[Axis, Collective, int, Wire], float] = {}
        self._operations: dict[tuple[Axis, Collective, int, Wire], PlannedOperation | None] = {}

    def collective_s(self, axis: Axis, collective: Collective, size_bytes: float, wire: Wire = Wire.NONE) -> float:
        """Return the seconds of one collective along `axis`.

        `size_bytes` is the size of the whole buffer, and `wire` the encoding between hosts.
        """
        key = axis, collective, -(-int(size_bytes) // _ROUND_BYTES) * _ROUND_BYTES, wire
        if key not in self._known:
            self._known[key] = max(_collective_s(line, *key[1:]) for line in self._lines[axis])
        return self._each_s + self._known[key]

    def operation(
        self, axis: Axis, collective: Collective, size_bytes: float, wire: Wire = Wire.NONE
    ) -> PlannedOperation | None:
        """Return the operation that `collective_s` prices; None if it takes no time.

        `each_s` passes before the operation's moves.
        """
        key = axis, collective, -(-int(size_bytes) // _ROUND_BYTES) * _ROUND_BYTES, wire
        if key not in self._operations:
            self._operations[key] = self._slowest(*key)
        return self._operations[key]

    def _slowest(self, axis: Axis, collective: Collective, size_bytes: int, wire: Wire) -> PlannedOperation | None:
        found = [_operation(line, collective, size_bytes, wire) for line in self._lines[axis] if line.ranks > 1]
        if not found:
            return None
        slowest = max(found, key=lambda each: each.seconds)
        before_s, seconds = slowest.before_moves_s + self._each_s, slowest.seconds + self._each_s
        return replace(slowest, before_moves_s=before_s, seconds=seconds)

    def message_s(self, axis: Axis, size_bytes: float) -> float:
        """Return the seconds of a message from one rank of `axis` to the next."""
        return self._each_s + max(_message_s(line, size_bytes) for line in self._lines[axis])


@lru_cache(maxsize=64)
def prices_of(parallelism: Parallelism, topology: Topology, each_s: float = 0.0) -> Prices:
    """Return the prices of a mix on a topology. Forecasts of the same mix share them."""
    return Prices(parallelism, topology, each_s)


def _collective_s(line: Topology, collective: Collective, size_bytes: int, wire: Wire) -> float:
    return 0.0 if line.ranks == 1 else _operation(line, collective, size_bytes, wire).seconds


@lru_cache(maxsize=4096)
def _operation(line: Topology, collective: Collective, size_bytes: int, wire: Wire) -> PlannedOperation:
    return planned_operation(Task(collective=collective, size_bytes=size_bytes, wire=wire), line)


def _message_s(line: Topology, size_bytes: float) -> float:
    link = line.shm if len(line.hosts) == 1 else min(line.rails, key=lambda rail: rail.bandwidth_bytes_per_s)
    return link.latency_s + link.overhead_s + size_bytes / link.bandwidth_bytes_per_s


def _slowest_lines(lines: Sequence[tuple[int, ...]], topology: Topology) -> list[Topology]:
    """Return the distinct topologies of `lines`, each with its part of the shared rails and uplinks."""
    host_of, rack_of = topology.host_of(), topology.rack_of()
    leaving_hosts: Counter[int] = Counter()
    leaving_racks: Counter[int] = Counter()
    for line in lines:
        hosts = {host_of[rank] for rank in line}
        racks = {rack_of[host] for host in hosts}
        leaving_hosts.update(hosts if len(hosts) > 1 else ())
        leaving_racks.update(racks if len(racks) > 1 else ())
    found: dict[str, Topology] = {}
    for line in lines:
        hosts = {host_of[rank] for rank in line}
        own = topology.restricted(line)
        if len(hosts) > 1:
            own = _shared(
                own,
                max(leaving_hosts[host] for host in hosts),
                max((leaving_racks[rack_of[host]] for host in hosts), default=1),
            )
        found.setdefault(repr(replace(own, names=())), own)
    return list(found.values())


def _shared(topology: Topology, on_rails: int, on_uplinks: int) -> Topology:
    return replace(
        topology,
        rails=tuple(_part(rail, on_rails) for rail in topology.rails),
        own_rails=tuple(
            replace(own, rails=tuple(_part(rail, on_rails) for rail in own.rails)) for own in topology.own_rails
        ),
        racks=tuple(
            replace(rack, uplinks=tuple(link and _part(link, max(on_uplinks, 1)) for link in rack.uplinks))
            for rack in topology.racks
        ),
    )


def _part(link: Link, users: int) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / users)
