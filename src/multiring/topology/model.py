"""The topology as a value: hosts, their ranks, and the constants of the two kinds of link."""

import math
from dataclasses import dataclass, fields

from multiring.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The constants of a link, as one rank sees it in one direction (docs/algorithms.md defines the model).

    A message of b bytes costs its sender's port `overhead_s + b / bandwidth_bytes_per_s` and arrives
    `latency_s` later. Every byte that a reduction writes costs another 1 / reduce_bytes_per_s.

    Raises:
        ArgumentError: a time is negative, or a bandwidth is not positive.
    """

    latency_s: float
    overhead_s: float
    bandwidth_bytes_per_s: float
    reduce_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            is_time = name.endswith("_s") and not name.endswith("_per_s")
            if math.isnan(value) or value < 0 or (value == 0 and not is_time):
                raise ArgumentError(f"{name}={value}: want a number {'>= 0' if is_time else '> 0'}")


# Orders of magnitude, so that plans are sane before anything was measured; a measured topology replaces them.
SHM = Link(latency_s=2e-6, overhead_s=0.5e-6, bandwidth_bytes_per_s=5e9, reduce_bytes_per_s=10e9)
TCP = Link(latency_s=30e-6, overhead_s=5e-6, bandwidth_bytes_per_s=1.25e9, reduce_bytes_per_s=5e9)


@dataclass(frozen=True, slots=True)
class Topology:
    """Which ranks share a host, and what links cost.

    `hosts` lists each host's ranks of the group. `tcp` is one host's way to the others, shared by
    all of its ranks; `shm` is what each rank has for itself.

    Raises:
        ArgumentError: the hosts' ranks are not exactly 0, 1, ... each once.
    """

    hosts: tuple[tuple[int, ...], ...]
    shm: Link = SHM
    tcp: Link = TCP

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.hosts):
            raise ArgumentError(f"hosts={self.hosts}: want every rank 0, 1, ... once, and no host empty")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.hosts))

    def host_of(self) -> tuple[int, ...]:
        """Return the index of each rank's host."""
        found = {rank: index for index, host in enumerate(self.hosts) for rank in host}
        return tuple(found[rank] for rank in range(self.ranks))
