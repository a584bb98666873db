"""Compare measured with predicted times, and correct the topology's constants if they no longer hold.

Every rank of a group passes the same table, so all ranks come to the same result.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from multiring._topology import Link, OwnRails, Topology

FAR = 1.5  # measured / predicted seconds above which a check fails
TIMES = 2  # failed checks in a row before the review has a finding
_SLOW = 2 / 3  # fraction of the median host's rate; a host below it is slow. Rates are relative to the stated rates.


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Corrections to the bandwidths of a topology's rails, as factors."""

    of_all: float = 1.0
    of_host: tuple[tuple[int, float], ...] = ()  # (slow host, its factor relative to the others)

    def applied(self, topology: Topology) -> Topology:
        """Return `topology` with corrected rails."""
        slow = dict(self.of_host)
        own = []
        for host in range(len(topology.hosts)):
            rails = topology.rails_of(host)
            if host in slow or rails != topology.rails:
                own.append(OwnRails(host=host, rails=_scaled(rails, self.of_all * slow.get(host, 1.0))))
        return replace(topology, rails=_scaled(topology.rails, self.of_all), own_rails=tuple(own))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of failed checks: measured / predicted time, the slow hosts, and the corrected constants."""

    ratio: float
    hosts: tuple[str, ...]
    constants: Constants


@dataclass(slots=True)
class Review:
    """The checks of one group so far."""

    topology: Topology
    constants: Constants = Constants()
    far: int = 0  # failed checks in a row

    def check(self, table: NDArray[np.float64]) -> Finding | None:
        """Add a check.

        After TIMES failed checks in a row, correct `constants` and return the finding; else None.

        Args:
            table: one row per rank: measured seconds, predicted seconds for the same operations (both 0 if nothing
                was measured), then the bytes per second that each host took from this rank (0: hardly any).
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
        # Correct either the slow hosts or all hosts, so that a slow host's slowdown does not count twice.
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
        """Return the bytes per second of each slow host's best connection, and the same number of a usual host.

        Only a host's best connection is compared, because a connection may wait for data from another one. In a ring
        the neighbours of a slow host are slow on one side. So hosts that are slow on both sides are preferred, then
        hosts that send slowly, then hosts that receive slowly.
        """
        hosts = np.asarray(self.topology.host_of())
        every = range(len(self.topology.hosts))
        stated = np.array(self.stated())
        # Traffic that passes a token bucket in a burst seems faster than the wire, so cap rates at the stated rate.
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
        """Return the total stated bandwidth of each host's rails, in bytes per second."""
        every = range(len(self.topology.hosts))
        return [sum(rail.bandwidth_bytes_per_s for rail in self.topology.rails_of(host)) for host in every]

    def named(self, host: int) -> str:
        """Return a host's name and ranks, for messages."""
        ranks = list(self.topology.hosts[host])
        name = f"{self.topology.names[host]} " if self.topology.names else ""
        return f"host {name}(ranks {ranks})"


def _scaled(rails: tuple[Link, ...], part: float) -> tuple[Link, ...]:
    return tuple(replace(rail, bandwidth_bytes_per_s=rail.bandwidth_bytes_per_s * part) for rail in rails)
