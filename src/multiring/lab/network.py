"""The wires of a lab: interfaces, bridges and rates, made over netlink.

Each rail has a bridge for every rack, and one more that the racks' uplinks meet in; all of them are in a network
namespace of their own, so that nothing is ever made in this machine's. A link is a pair of virtual interfaces, and
its rate is a token bucket (tbf) at both ends, one for each direction.
"""

import errno
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from multiring.errors import LaunchError, UnsupportedError
from multiring.lab.namespaces import Space, inside, inside_new, open_namespace
from multiring.lab.plan import Plan, Rate, rail_name, rate_text

_ROOT = 0xFFFFFFFF  # TC_H_ROOT of <linux/pkt_sched.h>
_BUCKET, _WIRE, _SWITCH = "tbf", "veth", "bridge"
# A bucket as small as timers on a busy machine allow (1 ms loses a tenth of two gigabit links on two cores, 2 ms
# none; docs/decisions/0010-lab.md): what is in it is sent for free.
_BURST_S = 2e-3
_LEAST_BURST_BYTES = 4096
# Large enough for the largest packet TCP hands down (64 KiB, and some room: 68,000 bytes did not do), which then need
# not be cut up in software: four hosts with a second rail of 250 Mbit/s took 92 % of two cores for that, 25 % without.
# Hardware cuts packets without the processor. Slower wires than the second figure allows would send too much for free.
_WHOLE_PACKET_BYTES = 80_000
_WHOLE_PACKET_S = 4e-3
# What a switch holds for a port that is overrun.
_QUEUE_S = 25e-3
_LEAST_QUEUE_BYTES = 128 << 10


class Network:
    """The lab's wires, between hosts whose network namespaces are `hosts`; `close`d before those.

    Raises:
        UnsupportedError: the kernel has no bridge, virtual interface or token bucket.
        LaunchError: pyroute2 is not installed.
    """

    def __init__(self, plan: Plan, hosts: Sequence[int]) -> None:
        self._plan = plan
        self._hosts = hosts
        self._netlink = _load_netlink()
        with inside_new(Space.NET):
            self._switches = open_namespace(Space.NET)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the bridges up; they are gone with this, and every link's end at them."""
        os.close(self._switches)

    def set_link(self, host: int, rail: int, *, is_up: bool) -> None:
        """Plug a host's cable in, or pull it: both ends lose the carrier."""
        with self._talk(self._switches) as switches:
            switches.link("set", index=_index(switches, _port(host, rail)), state="up" if is_up else "down")

    def set_rate(self, host: int, rail: int, rate: Rate | None) -> None:
        """Give a host's link a rate, both ways."""
        for space, name in ((self._switches, _port(host, rail)), (self._hosts[host], rail_name(rail))):
            with self._talk(space) as netlink:
                _shape(netlink, _index(netlink, name), rate)

    @contextmanager
    def _talk(self, space: int) -> Iterator[Any]:
        with inside(space, Space.NET):  # a netlink socket stays in the namespace it was made in
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
        # Snooping would have it wait for multicast queries; there is no loop for spanning trees to break.
        netlink.link("add", ifname=name, kind=_SWITCH, br_mcast_snooping=0, br_stp_state=0)
    index = _index(netlink, name)
    netlink.link("set", index=index, state="up")
    return index


def _add_link(netlink: Any, name: str, peer: str, space: int | None) -> int:
    """Make a link with one end `name` here and the other in `space` (None: here too), and return this end."""
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
    """Let at most `rate` leave through an interface."""
    # A bucket that is there goes, with what waits in it: of a smaller one a packet that waits may be larger than all of
    # it, and would stop the link for good.
    if any(qdisc.get_attr("TCA_KIND") == _BUCKET for qdisc in netlink.get_qdiscs(index=index)):
        netlink.tc("del", index=index, parent=_ROOT)
    if rate is None:
        return
    bytes_per_s = rate // 8
    least = _WHOLE_PACKET_BYTES if bytes_per_s * _WHOLE_PACKET_S >= _WHOLE_PACKET_BYTES else _LEAST_BURST_BYTES
    burst = max(round(bytes_per_s * _BURST_S), least)
    queue = max(round(bytes_per_s * _QUEUE_S), _LEAST_QUEUE_BYTES)
    with _explained(f"token bucket filter ({_BUCKET}), so no rate of {rate_text(rate)}", "CONFIG_NET_SCH_TBF"):
        netlink.tc("replace", _BUCKET, index, rate=bytes_per_s, burst=burst, limit=queue + burst)


@contextmanager
def _explained(what: str, option: str) -> Iterator[None]:
    """Say what the kernel lacks, where the netlink error means that."""
    try:
        yield
    except importlib.import_module("pyroute2").NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
        raise UnsupportedError(
            f"this kernel has no {what}: load its module with modprobe, or take a kernel with {option}"
        ) from None
