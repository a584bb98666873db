"""The topology file that a lab writes on every host.

MULTIRING_TOPOLOGY names it for the ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

from multiring._topology import TCP, Link, Rack, Topology, text_of
from multiring.errors import ArgumentError
from multiring.lab.plan import LabPlan, Rate, host_name, rack_of, rail_name, rate_text

TOPOLOGY_FILE = "/dev/shm/.multiring-lab/topology.toml"  # noqa: S108 -- on the host's own tmpfs, gone with the host
# The share of a rate that carries payload: an Ethernet frame of 1514 bytes has 1448 bytes of TCP payload.
_PAYLOAD = 1448 / 1514


def topology_of_lab(plan: LabPlan) -> Topology:
    """Return the topology of a lab with one rank per host.

    A link without limit gets the default constants of TCP.
    """
    return topology_of_rates(plan.hosts, plan.rails, plan.racks, plan.uplink)


def topology_of_rates(
    hosts: int, rails: Sequence[Rate | None] = (None,), racks: int = 1, uplink: Rate | None = None
) -> Topology:
    """Return the topology of equal hosts like those of a lab, with one rank each; it may be larger than a lab.

    Args:
        hosts: the number of hosts.
        rails: the rate of each rail in bits per second; None: the default constants of TCP.
        racks: the number of racks; hosts are assigned to them in order, as evenly as possible.
        uplink: the rate of the link that joins a rack to the others, per rail; None: no limit.

    Raises:
        ArgumentError: there is no host or no rack, a rack would be empty, or an uplink has only one rack.
    """
    if hosts < 1 or not 1 <= racks <= hosts:
        raise ArgumentError(f"{racks} racks for {hosts} hosts: want at least 1 host, and from 1 rack to one for each")
    if uplink is not None and racks == 1:
        raise ArgumentError(f"an uplink of {rate_text(uplink)} needs several racks, but there is only one")
    uplinks = () if uplink is None else (_link(uplink),) * len(rails)
    standing: list[list[int]] = [[] for _ in range(racks)]
    for host in range(hosts):
        standing[rack_of(host, hosts, racks)].append(host)
    found = [Rack(hosts=tuple(those), uplinks=uplinks, name=f"rack{rack}") for rack, those in enumerate(standing)]
    return Topology(
        hosts=tuple((host,) for host in range(hosts)),
        rails=tuple(_link(rate) for rate in rails),
        racks=tuple(found) if racks > 1 else (),
        names=tuple(host_name(host) for host in range(hosts)),
        interfaces=tuple(rail_name(rail) for rail in range(len(rails))),
    )


def topology_text(plan: LabPlan) -> str:
    """Return the text of the topology file of a lab."""
    return text_of(topology_of_lab(plan), "The virtual hosts of multiring lab, with the requested rates.")


def _link(rate: Rate | None) -> Link:
    return TCP if rate is None else replace(TCP, bandwidth_bytes_per_s=rate / 8 * _PAYLOAD)
