"""What a lab is: hosts, rails, racks and rates, and the names and addresses that follow from them."""

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
_MOST_BITS = 8 * 0xFFFFFFFF  # the token bucket's rate is 32 bits of bytes a second
_MOST_RAILS = 16

Rate = int  # bits per second


def parse_rate(text: str) -> Rate:
    """Return the bits per second that `text`, like 1gbit, 250mbit or 1.5Gbit, stands for.

    Raises:
        ArgumentError: it is no rate, or none that a link can have.
    """
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ArgumentError(f"{text!r} is no rate, want a number and bit, kbit, mbit or gbit (a second), like 250mbit")
    rate = Fraction(match[1]) * _UNITS[match[2]]
    if not _LEAST_BITS <= rate <= _MOST_BITS:
        raise ArgumentError(f"a link cannot have the rate {text!r}, want {_LEAST_BITS // 1000}kbit to 34gbit")
    return int(rate)


def parse_slots(text: str) -> int | tuple[int, ...]:
    """Return the slots that `text`, like 4 or 4,4,3,1, stands for.

    Raises:
        ArgumentError: it is neither a number nor some with commas between.
    """
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ArgumentError(f"{text!r} slots: want how many ranks each host has, like 4, or one for each: 4,4,3,1")
    return int(words[0]) if len(words) == 1 else tuple(map(int, words))


def rate_text(rate: Rate | None) -> str:
    """Return `rate` as `parse_rate` reads it."""
    if rate is None:
        return "no limit"
    unit = max((unit for unit in _UNITS if _UNITS[unit] <= rate), key=lambda unit: _UNITS[unit])
    return f"{rate / _UNITS[unit]:g}{unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A lab's hosts and wires. Hosts are dealt to the racks in order, as evenly as it goes.

    `rails` has the rate of each interface that every host has, `uplink` that of the wires which join each
    rack to the others, one for each rail; None is a wire without limit. `slots` is how many ranks a host has: one
    number for all, or one for each.

    Raises:
        ArgumentError: there can be no such lab.
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
                raise ArgumentError(f"{count} {what} make no lab, want at least 1")
        most = 2 ** (32 - _RAIL_PREFIX) - 2
        if self.hosts > most:
            raise ArgumentError(
                f"{self.hosts} hosts with {self.slots_text} slots each are more than there are addresses on a rail "
                f"({self.subnet(0)}), want at most {most} hosts"
            )
        if len(self.slots_of_hosts) != self.hosts:
            raise ArgumentError(
                f"slots of {len(self.slots_of_hosts)} hosts, {self.slots_text}, for {self.hosts} hosts: want one number"
                " for each, or one for all"
            )
        if self.num_rails > _MOST_RAILS:
            raise ArgumentError(f"{self.num_rails} rails are too many, want at most {_MOST_RAILS}")
        if self.racks > self.hosts:
            raise ArgumentError(f"{self.racks} racks for {self.hosts} hosts: a rack would be empty")
        if self.uplink is not None and self.racks == 1:
            raise ArgumentError(f"an uplink of {rate_text(self.uplink)} joins racks, and there is one rack only")

    @property
    def num_rails(self) -> int:
        """How many interfaces every host has."""
        return len(self.rails)

    @property
    def num_ranks(self) -> int:
        """How many slots all hosts have together."""
        return sum(self.slots_of_hosts)

    @property
    def slots_of_hosts(self) -> tuple[int, ...]:
        """How many ranks each host has."""
        return (self.slots,) * self.hosts if isinstance(self.slots, int) else self.slots

    @property
    def slots_text(self) -> str:
        """The slots as `parse_slots` reads them."""
        return str(self.slots) if isinstance(self.slots, int) else ",".join(map(str, self.slots))

    def seats(self) -> list[tuple[int, int]]:
        """Return the host, and the number on it, of each rank."""
        return [(host, local) for host, slots in enumerate(self.slots_of_hosts) for local in range(slots)]

    def rack_of(self, host: int) -> int:
        """Return the rack that `host` stands in."""
        return host * self.racks // self.hosts

    def subnet(self, rail: int) -> ipaddress.IPv4Network:
        """Return the addresses of `rail`."""
        first = int(_NETWORK.network_address) + (rail << (32 - _RAIL_PREFIX))
        return ipaddress.IPv4Network((first, _RAIL_PREFIX))

    def address(self, host: int, rail: int = 0) -> str:
        """Return the address of `host` on `rail`."""
        return str(self.subnet(rail)[host + 1])

    def host_named(self, name: str) -> int:
        """Return the host that `name` (host1, host1-rail0 or an address) means.

        Raises:
            ArgumentError: there is none.
        """
        for host in range(self.hosts):
            addresses = [self.address(host, rail) for rail in range(self.num_rails)]
            if name in (host_name(host), *addresses, *(name_on_rail(host, rail) for rail in range(self.num_rails))):
                return host
        last = host_name(self.hosts - 1)
        raise ArgumentError(f"no host {name!r} in this lab, its hosts are {host_name(0)} to {last}")

    def rail_named(self, name: str) -> int:
        """Return the rail that `name`, like rail0, means.

        Raises:
            ArgumentError: there is none.
        """
        names = [rail_name(rail) for rail in range(self.num_rails)]
        if name not in names:
            raise ArgumentError(f"no rail {name!r} in this lab, its rails are {', '.join(names)}")
        return names.index(name)

    def hosts_file(self) -> str:
        """Return the text of every host's /etc/hosts; a host's plain name is its address on rail 0."""
        lines = ["127.0.0.1 localhost"]
        for rail in range(self.num_rails):
            for host in range(self.hosts):
                names = [name_on_rail(host, rail)]
                # The plain name first: it is what a look-up by address answers.
                names[:0] = [host_name(host)] if rail == 0 else []
                lines.append(f"{self.address(host, rail)} {' '.join(names)}")
        return "\n".join(lines) + "\n"


def host_name(host: int) -> str:
    """Return what `host` calls itself."""
    return f"host{host}"


def rail_name(rail: int) -> str:
    """Return the name of every host's interface on `rail`."""
    return f"rail{rail}"


def name_on_rail(host: int, rail: int) -> str:
    """Return the name that /etc/hosts has for the address of `host` on `rail`."""
    return f"{host_name(host)}-{rail_name(rail)}"
