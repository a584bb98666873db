"""Rails: the interfaces that the tcp engine uses.

This module chooses them, checks that all ranks agree, and watches the rails' speed.
"""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from multiring._limits.processes import start_thread
from multiring._native import Context
from multiring._runtime.bootstrap.addresses import address_of_rail, own_address
from multiring._setting_values import Rail
from multiring._settings import Settings
from multiring._topology import Link, OwnRails, Topology
from multiring.errors import LaunchError

_log = logging.getLogger("multiring")
_LOOK_S = 1.0
_END_S = 5.0
# A rail's speed is computed over stretches in which it was busy for this long. A rail counts as slow if it carried less
# than half of its share in several stretches in a row. Token buckets, TCP slow start, a stopped host or other jobs can
# slow down a sound rail this much for a while.
_JUDGED_AFTER_S = 1.0
_SLOW = 0.5
_STRETCHES = 3


class RailEndpoint(NamedTuple):
    """The address at which a rank listens on one rail, and the rail's name and rate."""

    interface: str
    address: str
    port: int
    bits_per_s: float | None

    @property
    def end(self) -> tuple[str, int]:
        """The address and port to connect to."""
        return self.address, self.port


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The traffic on one rail from this rank to one peer.

    `acknowledged_bytes` counts the bytes that have arrived at the peer. `busy_s` counts the seconds in which there was
    data to send and the peer had room for it. Their quotient is the rail's goodput.
    """

    peer: int
    rail: int
    is_up: bool
    acknowledged_bytes: int
    busy_s: float

    def since(self, before: "Traffic | None") -> "Traffic":
        """Return the traffic since `before`, or all traffic if `before` is None."""
        if before is None:
            return self
        carried = self.acknowledged_bytes - before.acknowledged_bytes
        return replace(self, acknowledged_bytes=carried, busy_s=self.busy_s - before.busy_s)


def chosen_rails(settings: Settings, known: Topology | None, *, met_locally: bool) -> list[tuple[Rail, str]]:
    """Return the rails that this rank uses, each with this host's address on it.

    The rails come from the first of these settings that is set: MULTIRING_RAILS, MULTIRING_INTERFACE, the topology
    file, the default route.

    Args:
        settings: this rank's settings.
        known: the topology file's contents; None without a file.
        met_locally: whether all ranks are on this machine. Then the loopback address is used unless the user names
            rails or an interface.

    Raises:
        LaunchError: an interface does not exist, or two rails have the same address.
    """
    rails, source = settings.rails, "MULTIRING_RAILS"
    if settings.engine == "mpi":  # MPI carries the data; multiring's own connections carry control messages only
        if rails is not None:
            raise LaunchError(
                "MULTIRING_RAILS is for the tcp engine, but the engine is mpi: MPI chooses its interfaces itself"
            )
    elif rails is None and settings.interface is None and known is not None and not met_locally:
        source = f"the topology file {settings.topology}"
        rails = tuple(Rail(name, None) for name in known.interfaces)
    if not rails:
        name = settings.interface or "default"
        address = "127.0.0.1" if met_locally and settings.interface is None else own_address(settings.interface)
        return [(Rail(name, None), address)]
    found = [(rail, address_of_rail(rail.interface, source)) for rail in rails]
    addresses = [address for _, address in found]
    if len(set(addresses)) < len(addresses):
        named = ", ".join(f"{rail.interface} ({address})" for rail, address in found)
        raise LaunchError(f"{source} names an address twice: {named}; want another interface for every rail")
    return found


def agreed_rails(told: Sequence[Sequence[Any]]) -> list[list[RailEndpoint]]:
    """Return the rails that each rank has reported.

    Raises:
        LaunchError: the ranks have different numbers of rails; the text lists them.
    """
    places = [[RailEndpoint(*place) for place in rails] for rails in told]
    ranks_by_rails: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, rails in enumerate(places):
        ranks_by_rails[tuple(place.interface for place in rails)].append(rank)
    if len({len(names) for names in ranks_by_rails}) > 1:
        who = "; ".join(
            f"{len(names)} ({', '.join(names)}) on ranks {ranks}" for names, ranks in ranks_by_rails.items()
        )
        raise LaunchError(f"all ranks must have equally many rails, but there are {who}; set MULTIRING_RAILS to match")
    return places


def topology_with(topology: Topology, places: Sequence[Sequence[RailEndpoint]]) -> Topology:
    """Return `topology` with the rails that the ranks use and the user's rates.

    Args:
        topology: the job's topology. Its rails are matched by name if all names are known, else by position.
        places: every rank's rails, the same number on all ranks. A host's rails are those of its first rank.
    """
    used = [place.interface for place in places[0]]
    known = list(topology.interfaces)
    if set(used) <= set(known):
        topology = _chosen(topology, [known.index(interface) for interface in used])
    elif len(used) <= len(topology.rails):
        topology = _chosen(topology, range(len(used)))
    else:
        racks = tuple(replace(rack, uplinks=()) for rack in topology.racks)
        links = (topology.rails[0],) * len(used)
        topology = replace(topology, rails=links, own_rails=(), interfaces=(), racks=racks)
    own = [
        OwnRails(host=host, rails=tuple(map(_rated, topology.rails_of(host), places[ranks[0]])))
        for host, ranks in enumerate(topology.hosts)
    ]
    rails = own[0].rails
    return replace(topology, rails=rails, own_rails=tuple(each for each in own if each.rails != rails))


def _chosen(topology: Topology, rails: Sequence[int]) -> Topology:
    if list(rails) == list(range(len(topology.rails))):
        return topology

    def of(links: Sequence[Link | None]) -> tuple[Any, ...]:
        return tuple(links[rail] for rail in rails) if links else ()

    return Topology(
        topology.hosts,
        shm=topology.shm,
        rails=of(topology.rails),
        racks=tuple(replace(rack, uplinks=of(rack.uplinks)) for rack in topology.racks),
        own_rails=tuple(replace(each, rails=of(each.rails)) for each in topology.own_rails),
        names=topology.names,
        interfaces=tuple(topology.interfaces[rail] for rail in rails) if topology.interfaces else (),
    )


def _rated(link: Link, place: RailEndpoint) -> Link:
    return link if place.bits_per_s is None else replace(link, bandwidth_bytes_per_s=place.bits_per_s / 8)


def traffic_of(context: Context) -> list[Traffic]:
    """Return the traffic of each connection to another host so far."""
    return [
        Traffic(peer=peer, rail=rail, is_up=is_up, acknowledged_bytes=acknowledged, busy_s=busy_s)
        for peer, rail, is_up, acknowledged, busy_s in context.rails()
    ]


def slow_rails(traffic: Sequence[Traffic], weights: Sequence[float]) -> dict[int, tuple[float, float]]:
    """Return the rails that are much slower than the best, relative to their weights.

    Args:
        traffic: the traffic to any number of peers over a stretch of time.
        weights: the expected relative speeds of the rails.

    Returns:
        By slow rail: its goodput, and the goodput expected from the best rail and the weights, in bytes/s.
    """
    goodput: dict[int, float] = {}
    for rail in range(len(weights)):
        own = [row for row in traffic if row.rail == rail]
        if not all(row.is_up for row in own):
            continue  # the rail is down, which was reported already
        busy_s = sum(row.busy_s for row in own)
        if busy_s >= _JUDGED_AFTER_S:
            goodput[rail] = sum(row.acknowledged_bytes for row in own) / busy_s
    best = max((value / weights[rail] for rail, value in goodput.items()), default=0.0)
    return {
        rail: (value, best * weights[rail]) for rail, value in goodput.items() if value / weights[rail] < _SLOW * best
    }


class RailWatch:
    """Logs, from its own thread, each rail that is lost or slow, once.

    Args:
        context: the native context with the rails.
        rank: this rank.
        rails: the rails of every rank.
        topology: the job's topology; the bandwidths of its rails are their weights.
    """

    def __init__(
        self, context: Context, rank: int, rails: Sequence[Sequence[RailEndpoint]], topology: Topology
    ) -> None:
        self._context = context
        self._rank = rank
        self._rails = rails
        self._host_of_rank = topology.host_of()
        links = topology.rails_of(self._host_of_rank[rank])
        self._weights = [link.bandwidth_bytes_per_s for link in links]
        self._before: dict[tuple[int, int], Traffic] = {}
        self._slow_stretches: Counter[int] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring rails", daemon=True)

    def start(self) -> None:
        """Start to watch.

        Raises:
            LaunchError: the kernel refuses the thread.
        """
        start_thread(self._thread, "this rank cannot start the thread that watches its rails")

    def stop(self) -> None:
        """Log the last news and end the thread. Call it before the context is closed."""
        self._stop.set()
        self._thread.join(_END_S)  # a logging handler of the program may wait for a full pipe

    def look(self) -> None:
        """Check the rails once."""
        for peer, rail, why in self._context.take_rail_losses():
            own, other = self._rails[self._rank][rail], self._rails[peer][rail]
            _log.warning(
                "rank %d: rail %d (%s, %s) to host %d (rank %d, %s) is given up: %s; the other rails take over",
                *(self._rank, rail, own.interface, own.address),
                *(self._host_of_rank[peer], peer, other.address, why),
            )
        self._judge(traffic_of(self._context))

    def _judge(self, traffic: Sequence[Traffic]) -> None:
        stretch = [row.since(self._before.get((row.peer, row.rail))) for row in traffic]
        rails = range(len(self._weights))
        if any(sum(row.busy_s for row in stretch if row.rail == rail) < _JUDGED_AFTER_S for rail in rails):
            return  # the stretch continues until every rail was busy for long enough
        self._before = {(row.peer, row.rail): row for row in traffic}
        slow = slow_rails(stretch, self._weights)
        for rail in set(self._slow_stretches) - set(slow):
            if self._slow_stretches[rail] < _STRETCHES:
                del self._slow_stretches[rail]
        for rail, (found, expected) in slow.items():
            self._slow_stretches[rail] += 1
            if self._slow_stretches[rail] != _STRETCHES:
                continue
            own = self._rails[self._rank][rail]
            _log.warning(
                "rank %d: rail %d (%s, %s) is slow: it carries %.0f Mbit/s; compared with the best rail, want %.0f",
                *(self._rank, rail, own.interface, own.address, found * 8e-6, expected * 8e-6),
            )

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.look()
        self.look()
