"""How long it takes to bring data to hosts: bounds on paper, from sizes and rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring.errors import ArgumentError

_UPLINK = "racks' uplinks"
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RackOfHosts:
    """Hosts behind one way to the others: how many, and the bytes a second that go in, and out."""

    hosts: int
    rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What data passes on its way; rates in bytes a second.

    Raises:
        ArgumentError: a rate that is not positive, or no host.
    """

    hosts: int
    source: float  # all that the source gives, to all hosts together
    down: float  # into a host, from anywhere
    up: float  # out of a host
    write: float = float("inf")  # to a host's disk
    racks: tuple[RackOfHosts, ...] = ()  # none where every host reaches every other without an uplink

    def __post_init__(self) -> None:
        rates = {"source": self.source, "down": self.down, "up": self.up, "write": self.write}
        for name, rate in rates.items():
            if not rate > 0:
                raise ArgumentError(f"{name}={rate}: want a rate > 0, in bytes a second")
        if self.hosts < 1:
            raise ArgumentError(f"{self.hosts} hosts: want at least one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Seconds until every host has what it is to have, and what bounds them."""

    seconds: float
    bound: str
    source_bytes: float


def _longest(times: dict[str, float], source_bytes: float) -> Forecast:
    bound = max(times, key=lambda name: times[name])
    return Forecast(seconds=times[bound], bound=bound, source_bytes=source_bytes)


def each_for_itself(site: Site, distinct: float, held: float) -> Forecast:
    """Forecast hosts that each read what they hold from the source.

    Args:
        site: the hosts.
        distinct: bytes of the data set that any host holds.
        held: bytes that each host is to hold.
    """
    del distinct
    own = min(site.down, site.write)
    read = held * site.hosts
    times = {"source": read / site.source, _slower(site): held / own}
    if site.racks:  # the source stands outside them
        times[_UPLINK] = max(held * rack.hosts / rack.rate for rack in site.racks)
    return _longest(times, read)


def read_once(site: Site, distinct: float, held: float) -> Forecast:
    """Forecast hosts that read each byte from the source once, and pass it on.

    The bound is max(D/s, h/min(d, w), H h / (s + H u)): nothing is at a host before it left the source, nor faster than
    the host takes it, nor do all hosts together get more than source and hosts send. With racks, what a rack needs and
    did not get from a source within it has to come through its uplink, wherever the source stands.

    Args:
        site: the hosts.
        distinct: as of `each_for_itself`.
        held: as of `each_for_itself`.
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
    """Return the least time in which each rack's uplink brings what its hosts need, and nobody within it read.

    In t seconds rack r gets at most t w_r of the n_r bytes that it needs; the rest has to be read within it. All racks
    together read each byte once: the least t has sum max(0, n_r - t w_r) = D.
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
