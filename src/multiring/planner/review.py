"""Measured against predicted: whether the constants a plan was made with still hold, and what to plan with if not.

Every rank of a group is given the same table, and comes to the same end.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from multiring.topology import Link, OwnRails, Topology

FAR = 1.5  # times what was predicted
TIMES = 2  # checks in a row that have to find it
_SLOW = 2 / 3  # of what the median host carries, both as parts of what is stated


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What the rails of a topology are believed to carry, as parts of what it states."""

    of_all: float = 1.0
    of_host: tuple[tuple[int, float], ...] = ()  # (host, part of what the others carry) of slow hosts

    def applied(self, topology: Topology) -> Topology:
        """Return `topology` with the rails that these constants mean."""
        slow = dict(self.of_host)
        own = []
        for host in range(len(topology.hosts)):
            rails = topology.rails_of(host)
            if host in slow or rails != topology.rails:
                own.append(OwnRails(host=host, rails=_scaled(rails, self.of_all * slow.get(host, 1.0))))
        return replace(topology, rails=_scaled(topology.rails, self.of_all), own_rails=tuple(own))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """That operations take `ratio` times what was predicted, which hosts are slow, and what to plan with."""

    ratio: float
    hosts: tuple[str, ...]
    constants: Constants


@dataclass(slots=True)
class Review:
    """The checks of one group so far."""

    topology: Topology
    constants: Constants = Constants()
    far: int = 0  # checks in a row

    def check(self, table: NDArray[np.float64]) -> Finding | None:
        """Return what is wrong, once it has been for TIMES checks in a row; `constants` are then the new ones.

        Args:
            table: a row for each rank: seconds measured, seconds predicted for the same (both 0 where nothing was
                measured), then the bytes per second that each host took from this rank meanwhile (0: hardly any).
        """
        known = table[(table[:, 0] > 0) & (table[:, 1] > 0)]
        if not len(known):
            return None
        ratio = float(np.median(known[:, 0] / known[:, 1]))
        self.far = self.far + 1 if ratio > FAR else 0
        if self.far < TIMES:
            return None
        self.far = 0
        carried = self._slow(table[:, 2:])
        slow = {host: max(round(each / usual, 2), 0.01) for host, (each, usual) in carried.items()}
        # One thing at a time: what a slow host explains must not be laid on all the others too.
        if slow.keys() - dict(self.constants.of_host).keys():
            self.constants = replace(self.constants, of_host=tuple(sorted(slow.items())))
        else:
            self.constants = replace(self.constants, of_all=self.constants.of_all / ratio)
        named = tuple(
            f"{self.named(host)}, whose best connection carries {each / 1e6:.3g} instead of {usual / 1e6:.3g} MB/s"
            for host, (each, usual) in carried.items()
        )
        return Finding(ratio=ratio, hosts=named, constants=self.constants)

    def _slow(self, rates: NDArray[np.float64]) -> dict[int, tuple[float, float]]:
        """Return what each slow host carries on its best connection, and what it would if it were like the others.

        Only the best one says something: one may wait for what comes in on another. In a ring the neighbours of a slow
        host are slow on one side, so hosts that are on both come first; then those that send slowly, and then those
        that take slowly.
        """
        hosts = np.asarray(self.topology.host_of())
        every = range(len(self.topology.hosts))
        stated = np.array(self.stated())
        # What passes a token bucket at once seems faster than the wire: never more than is stated.
        parts = np.minimum(rates / np.minimum(stated[hosts][:, None], stated), 1.0)
        sides = []
        for host in every:
            sent = float(parts[hosts == host][:, np.array(every) != host].max(initial=0.0))
            taken = float(parts[hosts != host][:, host].max(initial=0.0))
            sides.append((max(sent, taken), sent, taken))
        for side in zip(*sides, strict=True):
            usual = float(np.median(side)) if len(side) > 2 else max(side)
            found = {
                host: (part * float(stated[host]), usual * float(stated[host]))
                for host, part in enumerate(side)
                if 0 < part < _SLOW * usual
            }
            if found:
                return found
        return {}

    def stated(self) -> list[float]:
        """Return the bytes per second that the topology says of each host's rails together."""
        every = range(len(self.topology.hosts))
        return [sum(rail.bandwidth_bytes_per_s for rail in self.topology.rails_of(host)) for host in every]

    def named(self, host: int) -> str:
        """Return what the host is called, and its ranks."""
        ranks = list(self.topology.hosts[host])
        name = f"{self.topology.names[host]} " if self.topology.names else ""
        return f"host {name}(ranks {ranks})"


def _scaled(rails: tuple[Link, ...], part: float) -> tuple[Link, ...]:
    return tuple(replace(rail, bandwidth_bytes_per_s=rail.bandwidth_bytes_per_s * part) for rail in rails)
