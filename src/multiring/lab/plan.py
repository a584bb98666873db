"""The plan of a lab: hosts, rails, racks, rates, names and addresses."""

import ipaddress
import re
from dataclasses import dataclass
from fractions import Fraction

from multiring.errors import ArgumentError

_NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
_RAIL_PREFIX = 24
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(\w+)", re.ASCII)
_LEAST_BITS = 8_000
_MOST_BITS = 8 * 0xFFFFFFFF  # the token bucket stores its rate in bytes per second as 32 bits
_MOST_RAILS = 16

Rate = int  # bits per second


def parse_rate(text: str) -> Rate:
    """Return the bits per second for a text like 1gbit, 250mbit or 1.5Gbit.

    Raises:
        ArgumentError: the text is not a rate, or a link of a lab cannot have this rate.
    """
    rate = _bits_of(text)
    if not _LEAST_BITS <= rate <= _MOST_BITS:
        raise ArgumentError(f"a link cannot have the rate {text!r}, want {_LEAST_BITS // 1000}kbit to 34gbit")
    return int(rate)


def parse_paper_rate(text: str) -> Rate:
    """Return the bits per second for such a text, for a link that nothing has to limit: of a cluster on paper.

    Raises:
        ArgumentError: the text is not a rate, or less than one bit per second.
    """
    rate = int(_bits_of(text))
    if rate < 1:
        raise ArgumentError(f"a link cannot have the rate {text!r}, want 1bit or more")
    return rate


def _bits_of(text: str) -> Fraction:
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ArgumentError(f"{text!r} is not a rate, want a number and bit, kbit, mbit or gbit, like 250mbit")
    return Fraction(match[1]) * _UNITS[match[2]]


def parse_slots(text: str) -> int | tuple[int, ...]:
    """Return the slots for a text like 4 or 4,4,3,1.

    Raises:
        ArgumentError: the text is neither a number nor a list of numbers with commas.
    """
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ArgumentError(f"{text!r} slots: want the number of ranks of each host, like 4 for all, or 4,4,3,1")
    return int(words[0]) if len(words) == 1 else tuple(map(int, words))


def rate_text(rate: Rate | None) -> str:
    """Return `rate` as a text for `parse_rate`, or "no limit" for None."""
    if rate is None:
        return "no limit"
    unit = max((unit for unit in _UNITS if _UNITS[unit] <= rate), key=lambda unit: _UNITS[unit])
    return f"{rate / _UNITS[unit]:g}{unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabPlan:
    """The hosts and links of a lab.

    Hosts are assigned to racks in order, as evenly as possible.

    Args:
        hosts: the number of hosts.
        slots: the number of ranks on each host: one number for all hosts, or one for each.
        rails: the rate of each rail in bits per second; every host has an interface on each rail. None means no limit.
        racks: the number of racks.
        uplink: the rate of the link that joins a rack to the others, per rail. None means no limit.

    Raises:
        ArgumentError: such a lab is not possible.
    """

    hosts: int
    slots: int | tuple[int, ...] = 1
    rails: tuple[Rate | None, ...] = (None,)
    racks: int = 1
    uplink: Rate | None = None

    def __post_init__(self) -> None:
        for count, what in (
            (self.hosts, "hosts"),
            (min(self.slots_of_hosts, default=1), "slots"),
            (self.racks, "racks"),
            (self.num_rails, "rails"),
        ):
            if count < 1:
                raise ArgumentError(f"a lab with {count} {what}: want at least 1")
        most = 2 ** (32 - _RAIL_PREFIX) - 2
        if self.hosts > most:
            raise ArgumentError(
                f"{self.hosts} hosts with {self.slots_text} slots each are more than there are addresses on a rail "
                f"({self.subnet(0)}); want at most {most} hosts"
            )
        if len(self.slots_of_hosts) != self.hosts:
            raise ArgumentError(
                f"slots={self.slots_text} are for {len(self.slots_of_hosts)} hosts, but the lab has {self.hosts} "
                "hosts: want one number for each host, or one number for all"
            )
        if self.num_rails > _MOST_RAILS:
            raise ArgumentError(f"{self.num_rails} rails are too many; want at most {_MOST_RAILS}")
        if self.racks > self.hosts:
            raise ArgumentError(f"{self.racks} racks for {self.hosts} hosts: a rack would be empty")
        if self.uplink is not None and self.racks == 1:
            raise ArgumentError(f"an uplink of {rate_text(self.uplink)} needs several racks, but the lab has only one")

    @property
    def num_rails(self) -> int:
        """The number of rails, which is the number of interfaces of a host."""
        return len(self.rails)

    @property
    def num_ranks(self) -> int:
        """The number of slots of all hosts together."""
        return sum(self.slots_of_hosts)

    @property
    def slots_of_hosts(self) -> tuple[int, ...]:
        """The number of ranks on each host."""
        return (self.slots,) * self.hosts if isinstance(self.slots, int) else self.slots

    @property
    def slots_text(self) -> str:
        """The slots as a text for `parse_slots`."""
        return str(self.slots) if isinstance(self.slots, int) else ",".join(map(str, self.slots))

    def seats(self) -> list[tuple[int, int]]:
        """Return (host, rank on this host) for each rank."""
        return [(host, local) for host, slots in enumerate(self.slots_of_hosts) for local in range(slots)]

    def rack_of(self, host: int) -> int:
        """Return the rack of `host`."""
        return rack_of(host, self.hosts, self.racks)

    def subnet(self, rail: int) -> ipaddress.IPv4Network:
        """Return the subnet of `rail`."""
        first = int(_NETWORK.network_address) + (rail << (32 - _RAIL_PREFIX))
        return ipaddress.IPv4Network((first, _RAIL_PREFIX))

    def address(self, host: int, rail: int = 0) -> str:
        """Return the address of `host` on `rail`."""
        return str(self.subnet(rail)[host + 1])

    def host_named(self, name: str) -> int:
        """Return the index of the host with this name or address.

        A name is like host1 or host1-rail0.

        Raises:
            ArgumentError: there is no such host.
        """
        for host in range(self.hosts):
            addresses = [self.address(host, rail) for rail in range(self.num_rails)]
            if name in (host_name(host), *addresses, *(name_on_rail(host, rail) for rail in range(self.num_rails))):
                return host
        last = host_name(self.hosts - 1)
        raise ArgumentError(f"no host {name!r} in this lab; its hosts are {host_name(0)} to {last}")

    def rail_named(self, name: str) -> int:
        """Return the index of the rail with a name like rail0.

        Raises:
            ArgumentError: there is no such rail.
        """
        names = [rail_name(rail) for rail in range(self.num_rails)]
        if name not in names:
            raise ArgumentError(f"no rail {name!r} in this lab; its rails are {', '.join(names)}")
        return names.index(name)

    def hosts_file(self) -> str:
        """Return the text of /etc/hosts for all hosts.

        A host's plain name means its address on rail 0.
        """
        lines = ["127.0.0.1 localhost"]
        for rail in range(self.num_rails):
            for host in range(self.hosts):
                names = [name_on_rail(host, rail)]
                # The plain name comes first, because a look-up by address returns the first name.
                names[:0] = [host_name(host)] if rail == 0 else []
                lines.append(f"{self.address(host, rail)} {' '.join(names)}")
        return "\n".join(lines) + "\n"


def rack_of(host: int, hosts: int, racks: int) -> int:
    """Return the rack of `host`, if hosts are assigned to racks in order, as evenly as possible."""
    return host * racks // hosts


def host_name(host: int) -> str:
    """Return the host name of `host`."""
    return f"host{host}"


def rail_name(rail: int) -> str:
    """Return the name of every host's interface on `rail`."""
    return f"rail{rail}"


def name_on_rail(host: int, rail: int) -> str:
    """Return the name in /etc/hosts for the address of `host` on `rail`."""
    return f"{host_name(host)}-{rail_name(rail)}"
