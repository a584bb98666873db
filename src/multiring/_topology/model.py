"""The topology as a value: hosts, their ranks, their racks, and the costs of the links between them."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from multiring._topology.devices import UNMEASURED, DeviceCosts, HostDevices
from multiring.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The constants of a link, as one rank sees it in one direction (docs/algorithms.md defines the model).

    A message of b bytes occupies its sender's port for `overhead_s`, then the wire for b / bandwidth_bytes_per_s. It
    arrives `latency_s` later. A reduction takes another 1 / reduce_bytes_per_s for every byte that it writes.

    Raises:
        ArgumentError: a time is negative, or a bandwidth is not positive.
    """

    latency_s: float
    overhead_s: float
    bandwidth_bytes_per_s: float
    reduce_bytes_per_s: float

    def __post_init__(self) -> None:
        times, rates = (self.latency_s, self.overhead_s), (self.bandwidth_bytes_per_s, self.reduce_bytes_per_s)
        # Clusters have many links, so the usual case is fast.
        if min(times) >= 0 and min(rates) > 0 and not math.isnan(sum(times) + sum(rates)):
            return
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            is_time = name.endswith("_s") and not name.endswith("_per_s")
            if math.isnan(value) or value < 0 or (value == 0 and not is_time):
                raise ArgumentError(f"{name}={value}: want a number {'>= 0' if is_time else '> 0'}")


# Orders of magnitude that give sensible plans before anything is measured. A measured topology replaces them.
SHM = Link(latency_s=2e-6, overhead_s=0.5e-6, bandwidth_bytes_per_s=5e9, reduce_bytes_per_s=10e9)
TCP = Link(latency_s=30e-6, overhead_s=15e-6, bandwidth_bytes_per_s=1.25e9, reduce_bytes_per_s=5e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rack:
    """Hosts (indices) that reach each other without passing `uplinks`, their links to the other racks.

    `uplinks` has one entry per rail, None if the uplink does not limit that rail. It is empty if no rail is limited.
    """

    hosts: tuple[int, ...]
    uplinks: tuple[Link | None, ...] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRails:
    """The rails of one host (an index) that differ from the usual rails."""

    host: int
    rails: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of each host, the hosts of each rack, and the costs of links.

    `hosts` lists each host's ranks of the group. `shm` is the link of a rank within its host, at the rate of one rank;
    `rails` are the interfaces that connect a host to other hosts, shared by all of its ranks. Without `racks`, all
    hosts share one rack. `names` are the hosts' names, and `interfaces` the names of their rails; either is empty if it
    is unknown. `takes_turns` means that hosts are connected by processors only, on which ranks take turns, so that
    nothing overlaps. `devices` are the devices of the hosts of which they are known.

    Raises:
        ArgumentError: the ranks of `hosts` are not exactly 0, 1, ... each once; the hosts of `racks` are not the
            hosts, each once; the number of rails, names or interfaces is wrong; or `devices` are not of the hosts,
            each at most once.
    """

    hosts: tuple[tuple[int, ...], ...]
    shm: Link = SHM
    rails: tuple[Link, ...] = (TCP,)
    racks: tuple[Rack, ...] = ()
    own_rails: tuple[OwnRails, ...] = ()
    names: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    takes_turns: bool = False
    devices: tuple[HostDevices, ...] = ()
    device_costs: DeviceCosts = UNMEASURED

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.hosts):
            raise ArgumentError(f"hosts={self.hosts}: want every rank 0, 1, ... once, and no empty host")
        racked = sorted(host for rack in self.racks for host in rack.hosts)
        if self.racks and (racked != list(range(len(self.hosts))) or not all(rack.hosts for rack in self.racks)):
            raise ArgumentError(
                f"racks of hosts {racked}: want each of {len(self.hosts)} hosts once, and no empty rack"
            )
        if not self.rails:
            raise ArgumentError("rails=(): want at least one")
        sets = [each.rails for each in self.own_rails] + [rack.uplinks for rack in self.racks if rack.uplinks]
        if any(len(each) != len(self.rails) for each in sets):
            raise ArgumentError(f"uplinks, or a host's own rails: want one for each of {len(self.rails)} rails")
        if len(self.names) not in {0, len(self.hosts)} or len(self.interfaces) not in {0, len(self.rails)}:
            raise ArgumentError(
                f"names={self.names}, interfaces={self.interfaces}: want one for each host, one for each rail, or none"
            )
        having = [each.host for each in self.devices]
        if len(set(having)) < len(having) or not set(having) <= set(range(len(self.hosts))):
            raise ArgumentError(f"devices of hosts {having}: want some of {len(self.hosts)} hosts, each once")
        for each in self.devices:
            if len(each.used) not in {0, len(self.hosts[each.host])}:
                raise ArgumentError(
                    f"host {each.host}: the devices of {len(each.used)} ranks: want that of each of its "
                    f"{len(self.hosts[each.host])} ranks, or none"
                )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    def host_of(self) -> tuple[int, ...]:
        """Return the index of each rank's host."""
        found = {rank: index for index, host in enumerate(self.hosts) for rank in host}
        return tuple(found[rank] for rank in range(self.ranks))

    def rack_of(self) -> tuple[int, ...]:
        """Return the index of each host's rack; 0 for all hosts if racks are unknown."""
        found = {host: index for index, rack in enumerate(self.racks) for host in rack.hosts}
        return tuple(found.get(host, 0) for host in range(len(self.hosts)))

    def rails_of(self, host: int) -> tuple[Link, ...]:
        """Return the rails of one host."""
        return next((each.rails for each in self.own_rails if each.host == host), self.rails)

    def devices_of(self, host: int) -> HostDevices | None:
        """Return the devices of one host; None if they are unknown."""
        return next((each for each in self.devices if each.host == host), None)

    def digest(self) -> bytes:
        """Return 16 bytes that identify the topology; they are the same in all processes."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()

    def shape(self) -> str:
        """Return 16 digits that identify the layout of the ranks, independent of the costs of links."""
        lying = (self.hosts, [rack.hosts for rack in self.racks], len(self.rails))
        return hashlib.blake2b(repr(lying).encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        sizes = sorted({len(host) for host in self.hosts})
        ranks = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        racks = f" in {len(self.racks)} racks" if len(self.racks) > 1 else ""
        if len(self.hosts) == 1:
            return f"1 host of {ranks} ranks" if sizes[0] > 1 else "1 host of 1 rank"
        rails = f"{len(self.rails)} rails" if len(self.rails) > 1 else "1 rail"
        return f"{len(self.hosts)} hosts x {ranks} ranks{racks}, {rails}"

    def restricted(self, ranks: Sequence[int]) -> "Topology":
        """Return the topology of some ranks, renumbered: the new rank i is `ranks[i]`.

        Raises:
            ArgumentError: `ranks` is empty, has a rank twice, or has a rank that this topology lacks.
        """
        new = {rank: index for index, rank in enumerate(ranks)}
        most = self.ranks
        if not ranks or len(new) != len(ranks) or not all(0 <= rank < most for rank in ranks):
            raise ArgumentError(f"ranks={list(ranks)}: want some of 0 to {most - 1}, each once")
        left = [tuple(new[rank] for rank in host if rank in new) for host in self.hosts]
        kept = [index for index, host in enumerate(left) if host]
        found = self._with_hosts(kept, [left[index] for index in kept])
        # A rank keeps its device, although its place among the ranks of its host has changed.
        devices = []
        for host, old in enumerate(kept):
            own = self.devices_of(old)
            if own is not None:
                used = tuple(own.device_of(self.hosts[old].index(ranks[rank])) for rank in found.hosts[host])
                devices.append(replace(own, host=host, used=used))
        return replace(found, devices=tuple(devices))

    def placed(self, hosts: tuple[tuple[int, ...], ...], names: Sequence[str]) -> "Topology":
        """Return the topology of a job: its ranks, on the hosts that this topology has under the given names.

        Args:
            hosts: the ranks of each of the job's hosts.
            names: the name of each of these hosts. Two may have the same name, if ranks of one machine act as several
                hosts. An unknown name is looked up again without its domain.

        Raises:
            ArgumentError: this topology does not have a host.
        """
        if not self.names:
            return replace(self, hosts=hosts, racks=(), own_rails=(), names=tuple(names), devices=())
        index = {name: at for at, name in enumerate(self.names)}
        known = [index.get(name, index.get(name.partition(".")[0])) for name in names]
        strange = sorted({name for name, at in zip(names, known, strict=True) if at is None})
        if strange:
            raise ArgumentError(
                f"the topology does not know host {', '.join(map(repr, strange))}: it has {_shown(self.names)}; "
                "add the job's hosts to the file, or choose the file of this cluster"
            )
        return self._with_hosts([at for at in known if at is not None], hosts)

    def _with_hosts(self, kept: Sequence[int], hosts: Iterable[tuple[int, ...]]) -> "Topology":
        """Return this topology on other hosts: the new host i is the old host `kept[i]`, with the ranks `hosts[i]`."""
        racks = []
        for rack in self.racks:
            members = set(rack.hosts)
            standing = tuple(new for new, old in enumerate(kept) if old in members)
            racks += [replace(rack, hosts=standing)] if standing else []
        own = {each.host: each for each in self.own_rails}
        devices = {each.host: each for each in self.devices}
        return replace(
            self,
            hosts=tuple(hosts),
            racks=tuple(racks),
            own_rails=tuple(replace(own[old], host=new) for new, old in enumerate(kept) if old in own),
            names=tuple(self.names[old] for old in kept) if self.names else (),
            devices=tuple(replace(devices[old], host=new, used=()) for new, old in enumerate(kept) if old in devices),
        )


def _shown(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
