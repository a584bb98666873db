"""Lower bounds for the time to bring data to hosts, computed from sizes and rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring._topology import Topology
from multiring.errors import ArgumentError

_UPLINK = "racks' uplinks"
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RackOfHosts:
    """A rack: hosts that share one uplink to all other hosts."""

    hosts: int  # number of hosts in the rack
    rate: float  # bytes a second of the uplink in each direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The rates of all links between the source and the hosts, in bytes a second.

    Raises:
        ArgumentError: a rate is not positive, or there is no host.
    """

    hosts: int
    source: float  # the source's rate to all hosts together
    down: float  # a host's receive rate, from all senders together
    up: float  # a host's send rate
    write: float = float("inf")  # the rate of a host's disk
    racks: tuple[RackOfHosts, ...] = ()  # empty if hosts reach each other without uplinks

    def __post_init__(self) -> None:
        rates = {"source": self.source, "down": self.down, "up": self.up, "write": self.write}
        for name, rate in rates.items():
            if not rate > 0:
                raise ArgumentError(f"{name}={rate}: want a rate > 0, in bytes a second")
        if self.hosts < 1:
            raise ArgumentError(f"{self.hosts} hosts: want at least one")


def site_of(topology: Topology, *, source: float, write: float = float("inf"), by_rank: bool = False) -> Site:
    """Return the rates of a topology's links.

    Args:
        topology: the hosts, their rails and racks.
        source: the source's rate to all hosts together, in bytes a second.
        write: the rate of a host's disk, in bytes a second.
        by_rank: whether each rank counts as a host that has its part of the rails of its host. Ranks then get equal
            parts of the data, also on hosts with different numbers of ranks.

    Raises:
        ArgumentError: a rate is not positive.
    """
    weights = [len(ranks) if by_rank else 1 for ranks in topology.hosts]
    # The slowest host counts, because the forecast ends when every host has its samples.
    rate = min(
        sum(rail.bandwidth_bytes_per_s for rail in topology.rails_of(host)) / weight
        for host, weight in enumerate(weights)
    )
    # If one rail of a rack has no uplink limit, the rack has no limit.
    racks = tuple(
        RackOfHosts(
            hosts=sum(weights[host] for host in rack.hosts),
            rate=sum(float("inf") if link is None else link.bandwidth_bytes_per_s for link in rack.uplinks),
        )
        for rack in topology.racks
        if rack.uplinks
    )
    if len(racks) < len(topology.racks):  # collect the hosts of all racks without a limit in one unlimited rack
        rest = sum(weights) - sum(each.hosts for each in racks)
        racks = (*racks, RackOfHosts(hosts=rest, rate=float("inf"))) if racks else ()
    return Site(hosts=sum(weights), source=source, down=rate, up=rate, write=write, racks=racks)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingForecast:
    """The seconds until every host has its data, and the link that limits them."""

    seconds: float
    bound: str
    source_bytes: float


def _longest(times: dict[str, float], source_bytes: float) -> StagingForecast:
    bound = max(times, key=lambda name: times[name])
    return StagingForecast(seconds=times[bound], bound=bound, source_bytes=source_bytes)


def each_for_itself(site: Site, distinct: float, held: float) -> StagingForecast:
    """Return the forecast if each host reads all its data from the source.

    Args:
        site: the hosts and the rates.
        distinct: bytes of the data set that at least one host must hold.
        held: bytes that each host must hold.
    """
    del distinct
    own = min(site.down, site.write)
    read = held * site.hosts
    times = {"source": read / site.source, _slower(site): held / own}
    if site.racks:  # the source is outside the racks
        times[_UPLINK] = max(held * rack.hosts / rack.rate for rack in site.racks)
    return _longest(times, read)


def read_once(site: Site, distinct: float, held: float) -> StagingForecast:
    """Return the forecast if the hosts read each byte once and pass it on.

    The bound is max(D/s, h/min(d, w), H h / (s + H u)). D is `distinct`, h is `held`, H the number of hosts, and s, d,
    u, w are the rates `source`, `down`, `up`, `write`. The first term is the time in which the source sends every byte
    once. The second is the time in which a host receives and writes its bytes. The third is the time in which the
    source and all hosts together send all bytes. With racks, a rack's uplink must also carry all bytes that the rack
    needs and that no host in the rack reads from the source.

    Args:
        site: the hosts and the rates.
        distinct: as in `each_for_itself`.
        held: as in `each_for_itself`.
    """
    own = min(site.down, site.write)
    total = held * site.hosts
    once = min(distinct, total)
    times = {
        "source": once / site.source,
        _slower(site): held / own,
        "hosts' sending": total / (site.source + site.hosts * site.up),
    }
    if site.racks:
        times[_UPLINK] = _crossing_s(site.racks, once, held)
    return _longest(times, once)


def _crossing_s(racks: Sequence[RackOfHosts], once: float, held: float) -> float:
    """Return the least time in which the uplinks bring all bytes that the racks need from outside.

    In t seconds, the uplink of rack r with rate w_r brings at most t w_r of the n_r bytes that the rack needs. Hosts of
    the rack must read the rest from the source. All racks together read each byte once, D bytes in total. The least t
    therefore satisfies sum max(0, n_r - t w_r) = D.
    """
    needed = [min(once, held * rack.hosts) for rack in racks]
    low, high = 0.0, max(need / rack.rate for need, rack in zip(needed, racks, strict=True))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        read = sum(max(0.0, need - middle * rack.rate) for need, rack in zip(needed, racks, strict=True))
        low, high = (middle, high) if read > once else (low, middle)
    return high


def _slower(site: Site) -> str:
    return "host's disk" if site.write < site.down else "host's network"
