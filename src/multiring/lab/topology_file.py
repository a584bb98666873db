"""The topology file that a lab writes on every host.

MULTIRING_TOPOLOGY names it for the ranks.
"""

from dataclasses import replace

from multiring._topology import TCP, Link, Rack, Topology, text_of
from multiring.lab.plan import LabPlan, Rate, host_name, rail_name

TOPOLOGY_FILE = "/dev/shm/.multiring-lab/topology.toml"  # noqa: S108 -- on the host's own tmpfs, gone with the host
# The share of a rate that carries payload: an Ethernet frame of 1514 bytes has 1448 bytes of TCP payload.
_PAYLOAD = 1448 / 1514


def topology_of_lab(plan: LabPlan) -> Topology:
    """Return the topology of a lab with one rank per host.

    A link without limit gets the default constants of TCP.
    """
    uplinks = () if plan.uplink is None else (_link(plan.uplink),) * plan.num_rails
    standing = [[host for host in range(plan.hosts) if plan.rack_of(host) == rack] for rack in range(plan.racks)]
    racks = [Rack(hosts=tuple(hosts), uplinks=uplinks, name=f"rack{rack}") for rack, hosts in enumerate(standing)]
    return Topology(
        hosts=tuple((host,) for host in range(plan.hosts)),
        rails=tuple(_link(rate) for rate in plan.rails),
        racks=tuple(racks) if plan.racks > 1 else (),
        names=tuple(host_name(host) for host in range(plan.hosts)),
        interfaces=tuple(rail_name(rail) for rail in range(plan.num_rails)),
    )


def topology_text(plan: LabPlan) -> str:
    """Return the text of the topology file of a lab."""
    return text_of(topology_of_lab(plan), "The virtual hosts of multiring lab, with the requested rates.")


def _link(rate: Rate | None) -> Link:
    return TCP if rate is None else replace(TCP, bandwidth_bytes_per_s=rate / 8 * _PAYLOAD)
