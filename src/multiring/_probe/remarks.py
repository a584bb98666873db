"""Compare measured links with each other and with the stated links, and write warnings about slow links."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from multiring._topology import Link, OwnRails, Rack, Topology

_SLOW = 0.75  # a share of the median bandwidth; a host with a slower rail gets a warning
_WRONG = 0.7  # a share of the stated bandwidth; a slower rail gets a warning


def median_of(links: Sequence[Link]) -> Link:
    """Return the link whose constants are the medians of the constants of `links`."""
    return Link(
        latency_s=float(np.median([link.latency_s for link in links])),
        overhead_s=float(np.median([link.overhead_s for link in links])),
        bandwidth_bytes_per_s=float(np.median([link.bandwidth_bytes_per_s for link in links])),
        reduce_bytes_per_s=float(np.median([link.reduce_bytes_per_s for link in links])),
    )


def slow_hosts(
    topology: Topology, measured: list[list[Link]], usual: tuple[Link, ...]
) -> tuple[tuple[OwnRails, ...], list[str]]:
    """Return the rails of hosts slower than `usual`, and a warning for each.

    `measured` is by rail and host.
    """
    own, warnings = [], []
    for host in range(len(topology.hosts)):
        rails = []
        for rail, link in enumerate(usual):
            bandwidth = measured[rail][host].bandwidth_bytes_per_s
            is_slow = bandwidth < _SLOW * link.bandwidth_bytes_per_s
            rails.append(replace(link, bandwidth_bytes_per_s=bandwidth) if is_slow else link)
            if is_slow:
                warnings.append(
                    f"{_rail_name(topology, rail)} of host {_host_name(topology, host)} carries "
                    f"{_rate(bandwidth)}, the median host's {_rate(link.bandwidth_bytes_per_s)}"
                )
        if tuple(rails) != usual:
            own.append(OwnRails(host=host, rails=tuple(rails)))
    return tuple(own), warnings


def far_from_stated(topology: Topology, usual: tuple[Link, ...]) -> list[str]:
    """Return a warning for each rail whose usual bandwidth is far below the stated bandwidth."""
    if not topology.interfaces:  # the bandwidths are defaults
        return []
    return [
        f"{_rail_name(topology, rail)} carries {_rate(link.bandwidth_bytes_per_s)}, "
        f"but the topology states {_rate(stated.bandwidth_bytes_per_s)}"
        for rail, (link, stated) in enumerate(zip(usual, topology.rails, strict=True))
        if link.bandwidth_bytes_per_s < _WRONG * stated.bandwidth_bytes_per_s
    ]


def racked(rack: Rack, usual: tuple[Link, ...], rates: list[float]) -> Rack:
    """Return `rack` with the uplinks that are slower than all of its hosts together."""
    uplinks = tuple(
        replace(link, latency_s=0.0, overhead_s=0.0, bandwidth_bytes_per_s=rate)
        if 0 < rate < _SLOW * link.bandwidth_bytes_per_s * len(rack.hosts)
        else None
        for link, rate in zip(usual, rates, strict=True)
    )
    return replace(rack, uplinks=uplinks if any(uplinks) else ())


def _rail_name(topology: Topology, rail: int) -> str:
    return topology.interfaces[rail] if topology.interfaces else f"rail {rail}"


def _host_name(topology: Topology, host: int) -> str:
    return topology.names[host] if topology.names else str(host)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.4g} Mbit/s"
