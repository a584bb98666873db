"""What a lab tells its ranks of itself: the topology file that every host has, where MULTIRING_TOPOLOGY leads."""

from dataclasses import replace

from multiring.lab.plan import Plan, Rate, host_name, rail_name
from multiring.topology import TCP, Link, Rack, Topology, text_of

TOPOLOGY_FILE = "/dev/shm/.multiring-lab/topology.toml"  # noqa: S108 -- on the host's own tmpfs, gone with the host
# What of a rate is left for the bytes that programs send: Ethernet frames of 1514 bytes carry 1448 of TCP's.
_PAYLOAD = 1448 / 1514


def topology_of_lab(plan: Plan) -> Topology:
    """Return the topology of a lab, one rank a host. A wire without limit has the constants that nobody measured."""
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


def topology_text(plan: Plan) -> str:
    """Return the file."""
    return text_of(topology_of_lab(plan), "The virtual hosts of multiring lab, and the rates that were asked for.")


def _link(rate: Rate | None) -> Link:
    return TCP if rate is None else replace(TCP, bandwidth_bytes_per_s=rate / 8 * _PAYLOAD)
