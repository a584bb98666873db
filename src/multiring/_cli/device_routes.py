"""The tables of `multiring plan --device cuda`: the ways of an all-reduce of device tensors, with their prices."""

from collections.abc import Sequence
from dataclasses import replace

from multiring._bench.cases import size_text
from multiring._cli.output import show
from multiring._schedule import Collective
from multiring._topology import LINK_NAMES, HostDevices, Topology
from multiring.planner import DevicePlan, DeviceRoute, Task, auto_route, device_plans, problem_of_route

_HEAD = ("predicted ms", "way", "steps in ms")
_ORDER = (
    "NCCL adds in an order of its own: a named lowering, and none of the proven schedules. Prices of devices are "
    "verified on stand-ins only."
)


def described_devices(topology: Topology, link: str | None) -> Topology:
    """Return `topology` with a device for each rank, joined by links of the class `link`; None: with none."""
    if link is None:
        return topology
    described = (
        HostDevices(host=host, kinds=("GPU",) * len(ranks), link=LINK_NAMES[link])
        for host, ranks in enumerate(topology.hosts)
    )
    return replace(topology, devices=tuple(described))


def show_routes(tasks: Sequence[Task], topology: Topology) -> None:
    """Print a table for each task, and what is assumed.

    Raises:
        ArgumentError: a task is not an all_reduce.
    """
    defaults: dict[str, None] = {}
    for task in tasks:
        plans = device_plans(task, topology)
        _show_table(task, topology, plans)
        defaults.update(dict.fromkeys(name for plan in plans for name in plan.defaults))
    show("")
    if len(topology.devices) < len(topology.hosts):
        show("Assumed: a device for each rank of a host whose devices are unknown, and PCIe through one processor.")
    if defaults:
        show(
            f"Defaults, not measured: {', '.join(defaults)}. multiring probe --save FILE measures them in a job on "
            "the devices."
        )
    for route in DeviceRoute:
        if reason := problem_of_route(route, topology):
            show(f"Not {route.value}: {reason}.")
    show(_ORDER)


def _show_table(task: Task, topology: Topology, plans: Sequence[DevicePlan]) -> None:
    rows = [_HEAD, *map(_cells, plans)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{row[0].rjust(widths[0])}  {row[1].ljust(widths[1])}  {row[2]}" for row in rows]
    collective, size = Collective.ALL_REDUCE.value, size_text(task.size_bytes)
    show(f"\n{collective} of {size} of device tensors on {topology.ranks} ranks\n" + "\n".join(lines))
    reason = "by measured costs"
    if len(plans) == 1:
        reason = "the only way"
    elif any(plan.defaults for plan in plans):
        reason = "the usual way, because costs are not measured"
    show(f"MULTIRING_DEVICE_PATH=auto takes: {auto_route(task, topology).value} ({reason})")


def _cells(plan: DevicePlan) -> tuple[str, str, str]:
    steps = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in plan.parts)
    if plan.host_plan is not None:
        steps += f" ({plan.host_plan})"
    return f"{plan.predicted_seconds * 1e3:.4g}", plan.route.value, steps
