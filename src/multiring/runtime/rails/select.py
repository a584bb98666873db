"""The rails of a rank: which interfaces of its host the tcp engine uses, whether all ranks agree, and how they fare."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from multiring._native import Context
from multiring.errors import LaunchError
from multiring.runtime.bootstrap.addresses import address_of_rail, own_address
from multiring.setting_values import Rail
from multiring.settings import Settings
from multiring.topology import Link, OwnRails, Topology

_log = logging.getLogger("multiring")
_LOOK_S = 1.0
# A rail is judged by stretches in which it was at work this long, and called slow once it brought less than half of
# what its share would be in several running: token buckets, a connection's slow start, a host that was stopped and the
# shares of other jobs make that much difference between sound rails for a while.
_JUDGED_AFTER_S = 1.0
_SLOW = 0.5
_STRETCHES = 3


class RailEndpoint(NamedTuple):
    """Where a rank listens on one rail, and what it calls the rail."""

    interface: str
    address: str
    port: int
    bits_per_s: float | None

    @property
    def end(self) -> tuple[str, int]:
        """Return what to connect to."""
        return self.address, self.port


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one rail has carried from this rank to one other.

    `acknowledged_bytes` are those that have arrived there, `busy_s` the seconds in which there was something to carry
    and room for it over there: their quotient is the rail's goodput.
    """

    peer: int
    rail: int
    is_up: bool
    acknowledged_bytes: int
    busy_s: float

    def since(self, before: "Traffic | None") -> "Traffic":
        """Return what was carried since `before`; all of it where that is None."""
        if before is None:
            return self
        carried = self.acknowledged_bytes - before.acknowledged_bytes
        return replace(self, acknowledged_bytes=carried, busy_s=self.busy_s - before.busy_s)


def chosen_rails(settings: Settings, known: Topology | None, *, met_locally: bool) -> list[tuple[Rail, str]]:
    """Return the rails this rank is to use, with the address each starts from.

    MULTIRING_RAILS decides, else MULTIRING_INTERFACE, else the topology file, else the default route.

    Args:
        settings: this rank's.
        known: what the topology file says; None without one.
        met_locally: all ranks are on this machine, so that the loopback does unless the user names rails.

    Raises:
        LaunchError: an interface does not exist, or two rails are the same.
    """
    rails, source = settings.rails, "MULTIRING_RAILS"
    if settings.engine == "mpi":  # its own connection carries words only
        if rails is not None:
            raise LaunchError(
                "MULTIRING_RAILS is for the tcp engine, and the engine is mpi: an MPI chooses its interfaces itself"
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
    """Return every rank's rails as it told them.

    Raises:
        LaunchError: not all ranks have as many; the text says who has what.
    """
    places = [[RailEndpoint(*place) for place in rails] for rails in told]
    ranks_by_rails: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, rails in enumerate(places):
        ranks_by_rails[tuple(place.interface for place in rails)].append(rank)
    if len({len(names) for names in ranks_by_rails}) > 1:
        who = "; ".join(
            f"{len(names)} ({', '.join(names)}) on ranks {ranks}" for names, ranks in ranks_by_rails.items()
        )
        raise LaunchError(f"all ranks must have as many rails, but there are {who}; set MULTIRING_RAILS alike")
    return places


def topology_with(topology: Topology, places: Sequence[Sequence[RailEndpoint]]) -> Topology:
    """Return `topology` with the rails that the ranks really use, and the rates they were given.

    Args:
        topology: of the job; its rails are known by name, else they are the first ones.
        places: every rank's rails, equally many; a host's are those of its first rank.
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
    """Return what each connection to another host has carried so far."""
    return [
        Traffic(peer=peer, rail=rail, is_up=is_up, acknowledged_bytes=acknowledged, busy_s=busy_s)
        for peer, rail, is_up, acknowledged, busy_s in context.rails()
    ]


def slow_rails(traffic: Sequence[Traffic], weights: Sequence[float]) -> dict[int, tuple[float, float]]:
    """Return the rails far slower than another in proportion to their weights.

    Args:
        traffic: of any number of peers, over some stretch of time.
        weights: of the rails, what is expected of them relative to each other.

    Returns:
        By rail: its goodput, and what it would be were it as good as the best, in bytes/s.
    """
    goodput: dict[int, float] = {}
    for rail in range(len(weights)):
        own = [row for row in traffic if row.rail == rail]
        if not all(row.is_up for row in own):
            continue  # it was given up, and that was said
        busy_s = sum(row.busy_s for row in own)
        if busy_s >= _JUDGED_AFTER_S:
            goodput[rail] = sum(row.acknowledged_bytes for row in own) / busy_s
    best = max((value / weights[rail] for rail, value in goodput.items()), default=0.0)
    return {
        rail: (value, best * weights[rail]) for rail, value in goodput.items() if value / weights[rail] < _SLOW * best
    }


class RailWatch:
    """Says in the log, on a thread of its own, which rails are lost or slow; each once.

    Args:
        context: whose rails they are.
        rank: this rank.
        rails: of every rank.
        topology: of the job; the bandwidths it gives the rails are their weights.
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
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Say what there is to say, and end; before the context is closed."""
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Look once."""
        for peer, rail, why in self._context.take_rail_losses():
            own, other = self._rails[self._rank][rail], self._rails[peer][rail]
            _log.warning(
                "rank %d: rail %d (%s, %s) to host %d (rank %d, %s) is given up: %s; going on over the others",
                *(self._rank, rail, own.interface, own.address),
                *(self._host_of_rank[peer], peer, other.address, why),
            )
        self._judge(traffic_of(self._context))

    def _judge(self, traffic: Sequence[Traffic]) -> None:
        stretch = [row.since(self._before.get((row.peer, row.rail))) for row in traffic]
        rails = range(len(self._weights))
        if any(sum(row.busy_s for row in stretch if row.rail == rail) < _JUDGED_AFTER_S for rail in rails):
            return  # it goes on
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
                "rank %d: rail %d (%s, %s) is slow: it carries %.0f Mbit/s, beside the best rail %.0f were its share",
                *(self._rank, rail, own.interface, own.address, found * 8e-6, expected * 8e-6),
            )

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.look()
        self.look()
