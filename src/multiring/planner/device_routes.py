"""Price the ways of an all-reduce of device tensors, and choose one.

The ways are staging through host memory, NCCL inside hosts with the host's collectives between them, and NCCL
throughout.
Costs that nobody has measured have defaults, and a price names the defaults that it contains. NCCL's order of sums is
its own: none of the schedules here, which are proven, describes it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from multiring._schedule import Accumulation, Collective, Wire
from multiring._topology import DeviceLink, Link, OwnRails, Topology, device_paths
from multiring.errors import ArgumentError
from multiring.planner.plan import Plan, Task, cheapest

# Without measured costs, smaller tensors are staged: the host reduces them in the time of an agreement.
LEAST_NCCL_BYTES = 64 << 10
_LARGE_BYTES = 16 << 20  # the size whose price decides for which path the ranks open NCCL

# Defaults. The first four were measured on one H100 with PCIe 5.0 (benchmarks/results/gpu_h100_202611.md and
# gpu_verify_h100_202611.md). The others are those by which NCCL itself chooses (NCCL 2.30.7, commit 5067397c:
# src/graph/tuning.cc, ncclTunerConstantsDefaults, and src/graph/topo.h).
_COPY_LATENCY_S = 30e-6  # a copy of 1 KiB until the host knows, with a wait that sleeps: 27 to 32 us
_TO_HOST_BYTES_PER_S = 50e9  # 64 MiB from pinned memory: 49 to 54 GB/s
_TO_DEVICE_BYTES_PER_S = 53e9  # 53 to 54 GB/s
_ENGINE_CALL_S = 82.6e-6  # the host's time of an all_reduce_async of the nccl engine
_NCCL_BASE_S = 6.6e-6  # baseLatencies, ring, LL
_NCCL_STEP_S = {link: 0.6e-6 if link is DeviceLink.NVLINK else 1.0e-6 for link in DeviceLink}  # hwLatencies, ring, LL
_NCCL_NETWORK_STEP_S = 2.7e-6  # the same, between hosts
_NVLINK_BYTES_PER_S = 20e9  # SM70_NVLINK_BW and SM80_NVLINK_BW, one NVLink in one direction
_BRIDGE = 5 / 6  # INTEL_P2P_OVERHEAD: the part of PCIe's rate between devices through a processor
_SOCKETS_BYTES_PER_S = 10e9  # SKL_QPI_BW, between two sockets


class DeviceRoute(Enum):
    """A way of an all-reduce of device tensors. The value is its path, as `_topology/device_paths.py` names it."""

    STAGED = device_paths.STAGED
    HIERARCHICAL = device_paths.HIERARCHICAL
    NCCL = device_paths.NCCL


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """A way with its predicted time.

    `parts` are its steps, one after the other, with their seconds. `host_plan` is the schedule in host memory; None if
    NCCL does everything. `defaults` are the costs in the price that were not measured, by their names in topology
    files.
    """

    route: DeviceRoute
    parts: tuple[tuple[str, float], ...]
    host_plan: Plan | None
    defaults: tuple[str, ...]

    @property
    def predicted_seconds(self) -> float:
        """The predicted time of the whole all-reduce."""
        return sum(seconds for _, seconds in self.parts)


def device_plans(task: Task, topology: Topology) -> list[DevicePlan]:
    """Return the possible ways of an all-reduce of device tensors on `topology`, cheapest first.

    Hosts whose devices are unknown are priced as if each rank had a device of its own.

    Raises:
        ArgumentError: `task` is not an all_reduce.
        ScheduleError: there is no schedule for `task`.
    """
    if task.collective is not Collective.ALL_REDUCE:
        raise ArgumentError(f"{task.collective.value} of device tensors: want all_reduce, the only one with prices")
    plans = [_PRICES[route](task, topology) for route in _routes_of(task, topology)]
    return sorted(plans, key=lambda plan: plan.predicted_seconds)


def auto_route(task: Task, topology: Topology, least_bytes: int = LEAST_NCCL_BYTES) -> DeviceRoute:
    """Return the way that an all-reduce of device tensors takes if the program has no wish; see `chosen_route`.

    The ranks open NCCL for one path only, that of `auto_path`. A tensor for which staging is cheaper is staged.
    """
    return chosen_route(task, topology, frozenset({DeviceRoute.STAGED, auto_path(topology)}), least_bytes)


@lru_cache(maxsize=256)
def auto_path(topology: Topology) -> DeviceRoute:
    """Return the path for which the ranks open NCCL if the program has no wish: the way of a large tensor."""
    task = Task(collective=Collective.ALL_REDUCE, size_bytes=_LARGE_BYTES)
    return chosen_route(task, topology, frozenset(DeviceRoute))


@lru_cache(maxsize=1024)
def chosen_route(
    task: Task, topology: Topology, possible: Collection[DeviceRoute], least_bytes: int = LEAST_NCCL_BYTES
) -> DeviceRoute:
    """Return the way that an all-reduce of device tensors takes, out of the `possible` ones.

    If all costs that the possible ways need are measured, this is the cheapest way. Otherwise tensors of less than
    `least_bytes` are staged, and others take the default of `device_paths`, if it is possible. All ranks with the same
    arguments choose alike.

    Args:
        task: an all_reduce.
        topology: the ranks; all of them use devices.
        possible: a hashable collection that contains STAGED.
        least_bytes: the least size for NCCL while costs are not measured.
    """
    routes = [route for route in _routes_of(task, topology) if route in possible]
    if routes == [DeviceRoute.STAGED]:
        return DeviceRoute.STAGED
    plans = [_PRICES[route](task, topology) for route in routes]
    if any(plan.defaults for plan in plans):
        usual = DeviceRoute(device_paths.device_paths(topology.hosts)[0])
        return usual if usual in routes and task.size_bytes >= least_bytes else DeviceRoute.STAGED
    return min(plans, key=lambda plan: plan.predicted_seconds).route


def problem_of_route(route: DeviceRoute, topology: Topology) -> str:
    """Return why the ranks of `topology` cannot use a way, as far as the topology shows it; "" if they can."""
    if route is DeviceRoute.STAGED:
        return ""
    if topology.ranks == 1:
        return "there is a single rank"
    if route.value not in device_paths.device_paths(topology.hosts):
        return "all ranks are on one host" if len(topology.hosts) == 1 else "each host has a single rank"
    for host, ranks in enumerate(topology.hosts):
        sharing = _sharing(topology, host)
        if sharing > 1:
            return f"{len(ranks)} ranks of a host share its devices, and NCCL needs a device for each rank"
    return ""


def _routes_of(task: Task, topology: Topology) -> list[DeviceRoute]:
    """Return the ways that the topology allows, and that do what the task asks for.

    NCCL has no wire types, and no averages of integers.
    """
    if task.accumulation is Accumulation.ONCE:
        return [DeviceRoute.STAGED]
    routes = [route for route in DeviceRoute if not problem_of_route(route, topology)]
    return [route for route in routes if route is not DeviceRoute.NCCL or task.wire is Wire.NONE]


def _sharing(topology: Topology, host: int) -> int:
    """Return the most ranks of a host that share one of its devices."""
    devices, ranks = topology.devices_of(host), range(len(topology.hosts[host]))
    if devices is None:
        return 1
    used = [devices.device_of(place) for place in ranks]
    return max(used.count(device) for device in used)


@dataclass(slots=True)
class _Costs:
    """The costs of a topology's devices, and the names of those whose defaults were taken."""

    topology: Topology
    defaults: list[str]

    def _of(self, name: str, default: float, key: str) -> float:
        known: float | None = getattr(self.topology.device_costs, name)
        if known is None:
            self.defaults.append(key)
            return default
        return known

    def copy_s(self, size_bytes: float, *, to_host: bool) -> float:
        """Return the seconds of a copy of one rank, while the other ranks of its host copy, too."""
        sharing = max(_sharing(self.topology, host) for host in range(len(self.topology.hosts)))
        if to_host:
            rate = self._of("to_host_bytes_per_s", _TO_HOST_BYTES_PER_S / sharing, "to_host_mbit_per_s")
        else:
            rate = self._of("to_device_bytes_per_s", _TO_DEVICE_BYTES_PER_S / sharing, "to_device_mbit_per_s")
        return self._of("copy_latency_s", _COPY_LATENCY_S, "copy_latency_us") + size_bytes / rate

    def nccl_latency_s(self) -> float:
        """Return the time of a small all-reduce by NCCL over the ranks of a host, with the host's time of the call."""
        steps = max(2 * (len(host) - 1) * _NCCL_STEP_S[self._class(at)] for at, host in enumerate(self._hosts()))
        return self._of("nccl_latency_s", _ENGINE_CALL_S + _NCCL_BASE_S + steps, "nccl_latency_us")

    def nccl_bytes_per_s(self) -> float:
        """Return the rate of NCCL's ring over the ranks of a host: the slowest host's."""
        rate = min(self._ring_rate(at) for at, host in enumerate(self._hosts()) if len(host) > 1)
        return self._of("nccl_bytes_per_s", rate, "nccl_mbit_per_s")

    def network_latency_s(self) -> float:
        """Return the time of a small all-reduce by NCCL over all ranks of several hosts."""
        hosts, ranks, rail = len(self._hosts()), self.topology.ranks, self.topology.rails[0]
        inside = max(_NCCL_STEP_S[self._class(at)] for at in range(hosts))
        between = max(_NCCL_NETWORK_STEP_S, rail.latency_s + rail.overhead_s)
        steps = 2 * (ranks - hosts) * inside + 2 * (hosts - 1) * between
        return self._of("nccl_network_latency_s", _ENGINE_CALL_S + _NCCL_BASE_S + steps, "nccl_network_latency_us")

    def network_bytes_per_s(self) -> float:
        """Return the rate of NCCL's ring over all ranks: all rails of the slowest host, or less inside a host."""
        hosts = range(len(self._hosts()))
        rails = [sum(rail.bandwidth_bytes_per_s for rail in self.topology.rails_of(host)) for host in hosts]
        inside = [self._ring_rate(host) for host in hosts if len(self._hosts()[host]) > 1]
        return self._of("nccl_network_bytes_per_s", min([*rails, *inside]), "nccl_network_mbit_per_s")

    def _hosts(self) -> tuple[tuple[int, ...], ...]:
        return self.topology.hosts

    def _class(self, host: int) -> DeviceLink:
        devices = self.topology.devices_of(host)
        if devices is None:
            return DeviceLink.PCIE
        return devices.ring_class(devices.device_of(place) for place in range(len(self._hosts()[host])))

    def _ring_rate(self, host: int) -> float:
        """Return the default rate of a ring on one host: that of its slowest link, or of a slower class if faster.

        PCIe between devices is as fast as to the host, because it is the same link.
        """
        known, link, devices = self.topology.device_costs, self._class(host), self.topology.devices_of(host)
        pcie = min(
            known.to_host_bytes_per_s or _TO_HOST_BYTES_PER_S, known.to_device_bytes_per_s or _TO_DEVICE_BYTES_PER_S
        )
        rates = [min(pcie * _BRIDGE, _SOCKETS_BYTES_PER_S)]
        rates += [pcie * _BRIDGE] if link >= DeviceLink.PCIE else []
        rates += [pcie] if link >= DeviceLink.PCIE_SWITCH else []
        if link is DeviceLink.NVLINK and devices is not None:
            rates.append(devices.nvlinks * _NVLINK_BYTES_PER_S)
        return max(rates)


def _staged(task: Task, topology: Topology) -> DevicePlan:
    """Price staging: a copy of the whole tensor each way and the host's schedule between them, without a pipeline."""
    costs, host_plan = _Costs(topology, []), cheapest(task, topology)
    parts = (
        ("copy to the host", costs.copy_s(task.size_bytes, to_host=True)),
        ("host", host_plan.predicted_seconds),
        ("copy to the device", costs.copy_s(task.size_bytes, to_host=False)),
    )
    return _made(DeviceRoute.STAGED, parts, host_plan, costs)


def _hierarchical(task: Task, topology: Topology) -> DevicePlan:
    """Price NCCL inside the hosts.

    A host's sum has as many shares as the smallest host has ranks. The owner of a share copies it to its host, and the
    owners of one share, one of each host, reduce it. All shares are reduced at once.
    """
    costs, hosts = _Costs(topology, []), len(topology.hosts)
    shares, ranks = min(map(len, topology.hosts)), max(map(len, topology.hosts))
    share = math.ceil(task.size_bytes / shares)
    host_plan = cheapest(replace(task, size_bytes=share), _between(topology, shares))
    half = costs.nccl_latency_s() + (ranks - 1) / ranks * task.size_bytes / costs.nccl_bytes_per_s()
    parts = (
        ("agreement", _agreement_s(topology)),
        ("reduce-scatter by nccl", half),
        ("copy to the host", costs.copy_s(share, to_host=True)),
        (f"between {hosts} hosts", host_plan.predicted_seconds),
        ("copy to the device", costs.copy_s(share, to_host=False)),
        ("all-gather by nccl", half),
    )
    return _made(DeviceRoute.HIERARCHICAL, parts, host_plan, costs)


def _nccl(task: Task, topology: Topology) -> DevicePlan:
    costs, ranks = _Costs(topology, []), topology.ranks
    if len(topology.hosts) == 1:
        latency_s, rate = costs.nccl_latency_s(), costs.nccl_bytes_per_s()
    else:
        latency_s, rate = costs.network_latency_s(), costs.network_bytes_per_s()
    reduced_s = latency_s + 2 * (ranks - 1) / ranks * task.size_bytes / rate
    return _made(DeviceRoute.NCCL, (("agreement", _agreement_s(topology)), ("nccl", reduced_s)), None, costs)


_PRICES = {DeviceRoute.STAGED: _staged, DeviceRoute.HIERARCHICAL: _hierarchical, DeviceRoute.NCCL: _nccl}


def _made(
    route: DeviceRoute, parts: tuple[tuple[str, float], ...], host_plan: Plan | None, costs: _Costs
) -> DevicePlan:
    return DevicePlan(route=route, parts=parts, host_plan=host_plan, defaults=tuple(dict.fromkeys(costs.defaults)))


@lru_cache(maxsize=256)
def _agreement_s(topology: Topology) -> float:
    """Return the time of the agreement of the ranks on an operation of NCCL: a reduction of one byte on the host."""
    return cheapest(Task(collective=Collective.ALL_REDUCE, size_bytes=1), topology).predicted_seconds


@lru_cache(maxsize=256)
def _between(topology: Topology, shares: int) -> Topology:
    """Return the topology of the owners of one share. The owners of a host's shares share its rails."""
    alone = topology.restricted([host[0] for host in topology.hosts])
    return replace(
        alone,
        rails=_shared(alone.rails, shares),
        own_rails=tuple(OwnRails(host=own.host, rails=_shared(own.rails, shares)) for own in alone.own_rails),
        racks=tuple(
            replace(rack, uplinks=tuple(None if link is None else _shared((link,), shares)[0] for link in rack.uplinks))
            for rack in alone.racks
        ),
    )


def _shared(links: tuple[Link, ...], shares: int) -> tuple[Link, ...]:
    return tuple(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / shares) for link in links)
