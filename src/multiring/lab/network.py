"""The links of a lab: interfaces, bridges and rates, made over netlink.

Each rail has a bridge for every rack, and a core bridge that connects the racks' uplinks. All bridges are in a separate
network namespace, so nothing is created in this machine's own namespace. A link is a pair of virtual interfaces. A
token bucket (tbf) at each end limits the rate of one direction.
"""

import errno
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from multiring.errors import LaunchError, UnsupportedError
from multiring.lab.namespaces import NamespaceKind, inside, inside_new, open_namespace
from multiring.lab.plan import LabPlan, Rate, rail_name, rate_text

_ROOT = 0xFFFFFFFF  # TC_H_ROOT of <linux/pkt_sched.h>
_BUCKET, _WIRE, _SWITCH = "tbf", "veth", "bridge"
# A bucket should be small, because its content is sent without a delay. Timers on a busy machine limit the size from
# below: on two cores with two gigabit links, a bucket of 1 ms loses a tenth of the rate, and a bucket of 2 ms loses
# nothing (docs/decisions/0010-lab.md).
_BURST_S = 2e-3
_LEAST_BURST_BYTES = 4096
# A bucket of this size holds the largest packet from TCP (64 KiB and some room; 68,000 bytes were too few). A smaller
# bucket makes the kernel split packets in software: four hosts with a second rail of 250 Mbit/s took 92 % of two cores
# with splitting and 25 % without. Real hardware splits packets without the processor. A link that needs longer than the
# second figure for such a packet gets a smaller bucket, because it would send too much without a delay.
_WHOLE_PACKET_BYTES = 80_000
_WHOLE_PACKET_S = 4e-3
# The queue of a switch for an overloaded port.
_QUEUE_S = 25e-3
_LEAST_QUEUE_BYTES = 128 << 10


def burst_bytes(rate: Rate) -> int:
    """Return the bytes that a link of this rate carries without a delay after a pause: the size of its token bucket."""
    bytes_per_s = rate // 8
    least = _WHOLE_PACKET_BYTES if bytes_per_s * _WHOLE_PACKET_S >= _WHOLE_PACKET_BYTES else _LEAST_BURST_BYTES
    return max(round(bytes_per_s * _BURST_S), least)


class Network:
    """The lab's links between hosts. Close it before the hosts.

    Args:
        plan: the plan of the lab.
        hosts: descriptors of the hosts' network namespaces.

    Raises:
        UnsupportedError: the kernel has no bridges, virtual interfaces or token buckets.
        LaunchError: pyroute2 is not installed.
    """

    def __init__(self, plan: LabPlan, hosts: Sequence[int]) -> None:
        self._plan = plan
        self._hosts = hosts
        self._netlink = _load_netlink()
        with inside_new(NamespaceKind.NET):
            self._switches = open_namespace(NamespaceKind.NET)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the bridges, and with them all links."""
        os.close(self._switches)

    def set_link(self, host: int, rail: int, *, is_up: bool) -> None:
        """Connect or disconnect a host's link.

        Both ends of a disconnected link lose the carrier.
        """
        with self._talk(self._switches) as switches:
            switches.link("set", index=_index(switches, _port(host, rail)), state="up" if is_up else "down")

    def set_rate(self, host: int, rail: int, rate: Rate | None) -> None:
        """Set the rate of a host's link in both directions; None removes the limit."""
        for space, name in ((self._switches, _port(host, rail)), (self._hosts[host], rail_name(rail))):
            with self._talk(space) as netlink:
                _shape(netlink, _index(netlink, name), rate)

    @contextmanager
    def _talk(self, space: int) -> Iterator[Any]:
        with inside(space, NamespaceKind.NET):  # a netlink socket belongs to the namespace in which it was created
            netlink = self._netlink.IPRoute()
        try:
            yield netlink
        finally:
            netlink.close()

    def _build(self) -> None:
        plan = self._plan
        with ExitStack() as stack:
            switches = stack.enter_context(self._talk(self._switches))
            for rail in range(plan.num_rails):
                bridges = [_add_bridge(switches, f"rack{rack}-{rail}") for rack in range(plan.racks)]
                if plan.racks > 1:
                    core = _add_bridge(switches, f"core-{rail}")
                    for rack, bridge in enumerate(bridges):
                        _join(switches, bridge, core, f"{rack}-{rail}", plan.uplink)
                for host in range(plan.hosts):
                    port = _add_link(switches, _port(host, rail), rail_name(rail), self._hosts[host])
                    _raise_port(switches, port, bridges[plan.rack_of(host)], plan.rails[rail])
            for host, space in enumerate(self._hosts):
                with self._talk(space) as netlink:
                    netlink.link("set", index=_index(netlink, "lo"), state="up")
                    for rail, rate in enumerate(plan.rails):
                        index = _index(netlink, rail_name(rail))
                        prefix = plan.subnet(rail).prefixlen
                        netlink.addr("add", index=index, address=plan.address(host, rail), prefixlen=prefix)
                        netlink.link("set", index=index, state="up")
                        _shape(netlink, index, rate)


def _load_netlink() -> Any:
    try:
        return importlib.import_module("pyroute2")
    except ModuleNotFoundError:
        raise LaunchError("the lab's network needs pyroute2: pip install pyroute2") from None


def _port(host: int, rail: int) -> str:
    return f"host{host}-{rail}"


def _index(netlink: Any, name: str) -> int:
    return int(netlink.link_lookup(ifname=name)[0])


def _add_bridge(netlink: Any, name: str) -> int:
    with _explained(f"bridges ({_SWITCH})", "CONFIG_BRIDGE"):
        # With multicast snooping the bridge would wait for queries. A spanning tree is not needed without loops.
        netlink.link("add", ifname=name, kind=_SWITCH, br_mcast_snooping=0, br_stp_state=0)
    index = _index(netlink, name)
    netlink.link("set", index=index, state="up")
    return index


def _add_link(netlink: Any, name: str, peer: str, space: int | None) -> int:
    """Make a link from `name` here to `peer` in namespace `space` (None: here too). Return the index of `name`."""
    other: dict[str, Any] = {"ifname": peer} if space is None else {"ifname": peer, "net_ns_fd": space}
    with _explained(f"virtual interfaces ({_WIRE})", "CONFIG_VETH"):
        netlink.link("add", ifname=name, kind=_WIRE, peer=other)
    return _index(netlink, name)


def _raise_port(netlink: Any, index: int, bridge: int, rate: Rate | None) -> None:
    netlink.link("set", index=index, master=bridge, state="up")
    _shape(netlink, index, rate)


def _join(netlink: Any, bridge: int, core: int, name: str, rate: Rate | None) -> None:
    up, down = f"up{name}", f"down{name}"
    _raise_port(netlink, _add_link(netlink, up, down, None), bridge, rate)
    _raise_port(netlink, _index(netlink, down), core, rate)


def _shape(netlink: Any, index: int, rate: Rate | None) -> None:
    """Limit the rate at which an interface sends; None removes the limit."""
    # Remove an existing bucket together with its waiting packets. Otherwise a waiting packet that is larger than a new,
    # smaller bucket would block the link forever.
    if any(qdisc.get_attr("TCA_KIND") == _BUCKET for qdisc in netlink.get_qdiscs(index=index)):
        netlink.tc("del", index=index, parent=_ROOT)
    if rate is None:
        return
    bytes_per_s, burst = rate // 8, burst_bytes(rate)
    queue = max(round(bytes_per_s * _QUEUE_S), _LEAST_QUEUE_BYTES)
    with _explained(f"token bucket filter ({_BUCKET}), so no rate of {rate_text(rate)}", "CONFIG_NET_SCH_TBF"):
        netlink.tc("replace", _BUCKET, index, rate=bytes_per_s, burst=burst, limit=queue + burst)


@contextmanager
def _explained(what: str, option: str) -> Iterator[None]:
    """Replace a netlink error by an UnsupportedError if it means that the kernel lacks a feature."""
    try:
        yield
    except importlib.import_module("pyroute2").NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
        raise UnsupportedError(
            f"this kernel has no {what}: load its module with modprobe, or use a kernel with {option}"
        ) from None
