"""multiring plan: show the possible plans of a collective, the cheapest first.

The hosts come from a topology file, from options like those of multiring lab, or from the job whose ranks run this
command. In a job, --measure also times each plan. Outside a job the command assumes this machine with one rank per
core. --save pins the first plan of each size, or the fastest one with --measure. --draw draws the sends of the pinned
plan of the last size.

--device cuda shows the ways of an all-reduce of CUDA tensors instead, with their prices.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from multiring._bench.cases import parse_size, size_text
from multiring._cli.device_routes import described_devices, show_routes
from multiring._cli.drawings import check_figure, rings, write_figure
from multiring._cli.number_option import COUNT, PAUSE, RANKS, SECONDS
from multiring._cli.output import show
from multiring._launch.cores import cores_of_cpus, usable_cpus
from multiring._probe import OtherWork, time_plans, with_devices
from multiring._runtime import Group, init, shutdown
from multiring._runtime.group.plan_file import write_pins
from multiring._runtime.rails.topology_file import read_topology
from multiring._schedule import SUMS, WIRES, Accumulation, Collective, Wire
from multiring._topology import LINK_NAMES, HostDevices, Topology
from multiring.errors import ArgumentError
from multiring.lab import parse_paper_rate, parse_slots
from multiring.lab.topology_file import topology_of_rates
from multiring.planner import Plan, Task, cheapest, count_of_plans, ranked

_SIZES = "4KiB,64KiB,1MiB,8MiB,32MiB"
_OTHERWISE = (
    "For other hosts give --hosts H --slots S --link RATE or --topology FILE, or start this as a job: "
    "multiring run -n N -- multiring plan"
)
_OF_HOSTS = ("link", "rail", "rack", "uplink")
_HEAD = ("predicted ms", "algorithm", "grid", "segments", "channels", "engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    known = [each.value for each in Collective]
    parser.add_argument("collective", nargs="?", default="all_reduce", choices=known, help="(default all_reduce)")
    parser.add_argument("--sizes", default=_SIZES, metavar="SIZE,...", help=f"sizes of buffers (default {_SIZES})")
    parser.add_argument("--top", type=COUNT, default=8, metavar="N", help="show N plans per size (default 8)")
    parser.add_argument("--wide", action="store_true", help="for 16-bit floats with sums accumulated in 32 bits")
    parser.add_argument(
        "--wire",
        choices=WIRES,
        help="encode the float32 values of an all_reduce between hosts",
    )
    parser.add_argument(
        "--measure", action="store_true", help="in a job: time these plans for an all_reduce of float32"
    )
    parser.add_argument("--seconds", type=SECONDS, default=1.0, metavar="S", help="time each plan for S (default 1)")
    parser.add_argument(
        "--drain", type=PAUSE, default=0.5, metavar="S", help="run each plan for S before timing it (default 0.5)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="pin the first plan of each size")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the first plan of the last size, as .svg")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tensors are (default cpu, the host's memory)",
    )
    parser.add_argument(
        "--device-link",
        choices=tuple(LINK_NAMES),
        help="with --hosts and --device cuda: one device a rank, with links of this class",
    )
    where = parser.add_argument_group("where (default: the job's hosts)")
    where.add_argument("--topology", type=Path, metavar="FILE", help="a topology file that names the hosts")
    where.add_argument("--hosts", type=RANKS, metavar="H", help="number of hosts")
    where.add_argument(
        "--slots", metavar="S", help="ranks on each host (default: as in FILE, or 1), or one number per host: 4,4,3,1"
    )
    where.add_argument("--link", metavar="RATE", help="speed of every host's link, like 1gbit")
    where.add_argument("--rail", action="append", default=[], metavar="RATE", help="add a rail of this speed")
    where.add_argument("--rack", type=RANKS, metavar="R", help="number of racks for the hosts (default 1)")
    where.add_argument("--uplink", metavar="RATE", help="speed of each rack's uplink, per rail")


def run(arguments: argparse.Namespace) -> int:
    """Print a table of plans for each size and return 0."""
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    if arguments.draw is not None:
        check_figure(arguments.draw)
    tasks = [_task(arguments, size_bytes) for size_bytes in sizes]
    described = _described(arguments)
    if arguments.device == "cuda":
        return _run_for_devices(arguments, tasks, described)
    if arguments.device_link is not None:
        raise ArgumentError(f"--device-link {arguments.device_link} describes devices: want --device cuda, too")
    if described is not None:
        if arguments.measure:
            raise ArgumentError(
                "--measure times the job's own hosts: leave out --topology and --hosts, and start a job"
            )
        chosen = [_cheapest_table(task, described, arguments.top) for task in tasks]
        _save(arguments, described, zip(tasks, chosen, strict=True))
        return 0
    group = init()
    try:
        if group.size == 1 and not arguments.measure:
            assumed = _this_machine()
            show(f"Assumed: {assumed}. The costs of its links are assumed, too. {_OTHERWISE}")
            chosen = [_cheapest_table(task, assumed, arguments.top) for task in tasks]
            _save(arguments, assumed, zip(tasks, chosen, strict=True))
            return 0
        chosen = [_in_job(group, task, arguments) for task in tasks]
        if group.rank == 0:
            _save(arguments, group.topology, zip(tasks, chosen, strict=True))
        return 0
    finally:
        shutdown()


def _run_for_devices(arguments: argparse.Namespace, tasks: Sequence[Task], described: Topology | None) -> int:
    """Print a table of ways for each size and return 0."""
    if arguments.measure or arguments.save is not None or arguments.draw is not None:
        raise ArgumentError("--device cuda shows prices only: leave out --measure, --save and --draw")
    if any(task.collective is not Collective.ALL_REDUCE for task in tasks):
        raise ArgumentError(f"{arguments.collective} --device cuda: want all_reduce, the only one with prices")
    if arguments.device_link is not None and arguments.hosts is None:
        raise ArgumentError("--device-link describes devices of hosts: say how many hosts there are with --hosts H")
    if described is not None:
        show_routes(tasks, described_devices(described, arguments.device_link))
        return 0
    group = init()
    try:
        topology = with_devices(group)
        if group.size == 1:
            topology = _this_machine(topology.devices)
            show(f"Assumed: {topology}. The costs of its links are assumed, too. {_OTHERWISE}")
        if group.rank == 0:
            show_routes(tasks, topology)
        return 0
    finally:
        shutdown()


def _task(arguments: argparse.Namespace, size_bytes: int) -> Task:
    collective = Collective(arguments.collective)
    if arguments.measure and (collective is not Collective.ALL_REDUCE or arguments.wide or size_bytes % 4):
        raise ArgumentError("--measure times only an all_reduce of float32: want sizes of whole floats, without --wide")
    wide = arguments.wide and collective in SUMS
    accumulation = Accumulation.WIDE if wide else Accumulation.SAME
    wire = Wire.NONE if arguments.wire is None else Wire[arguments.wire.upper()]
    if wire is not Wire.NONE and (collective is not Collective.ALL_REDUCE or wide):
        raise ArgumentError(
            f"--wire {arguments.wire} encodes only an all_reduce of float32: want that collective, without --wide"
        )
    return Task(collective=collective, size_bytes=size_bytes, accumulation=accumulation, wire=wire)


def _described(arguments: argparse.Namespace) -> Topology | None:
    slots = None if arguments.slots is None else parse_slots(arguments.slots)
    if arguments.topology is not None:
        given = [f"--{name}" for name in ("hosts", *_OF_HOSTS) if _is_given(arguments, name)]
        if given:
            raise ArgumentError(f"--topology has the hosts and links already: leave out {', '.join(given)}")
        known = read_topology(arguments.topology)
        if not known.names:
            raise ArgumentError(f"--topology {arguments.topology} names no hosts: add [[hosts]], or say --hosts H")
        return known if slots is None else _filled(known, slots)
    slots = 1 if slots is None else slots
    if arguments.hosts is None:
        for name in ("slots", *_OF_HOSTS):
            if _is_given(arguments, name):
                raise ArgumentError(f"--{name} describes hosts: say how many there are with --hosts H")
        return None
    rails = [None if rate is None else parse_paper_rate(rate) for rate in (arguments.link, *arguments.rail)]
    uplink = None if arguments.uplink is None else parse_paper_rate(arguments.uplink)
    racks = 1 if arguments.rack is None else arguments.rack
    return _filled(topology_of_rates(arguments.hosts, rails, racks, uplink), slots)


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) not in (None, [])


def _this_machine(devices: tuple[HostDevices, ...] = ()) -> Topology:
    """Return a topology of one host with one rank per device, or else per core, and at least two ranks."""
    if devices and len(devices[0].kinds) > 1:
        return Topology((tuple(range(len(devices[0].kinds))),), devices=(replace(devices[0], used=()),))
    cores = len(set(cores_of_cpus(usable_cpus()).values()))
    return Topology((tuple(range(max(cores, 2))),))


def _filled(topology: Topology, slots: int | tuple[int, ...]) -> Topology:
    """Return `topology` with `slots` ranks on each host, numbered host by host."""
    hosts = len(topology.names)
    each = (slots,) * hosts if isinstance(slots, int) else slots
    if len(each) != hosts or min(each) < 1:
        raise ArgumentError(f"--slots {slots}: want at least 1, one number for all or one for each of {hosts} hosts")
    ends = list(accumulate(each))
    ranks = tuple(tuple(range(end - count, end)) for end, count in zip(ends, each, strict=True))
    return topology.placed(ranks, topology.names)


def _in_job(group: Group, task: Task, arguments: argparse.Namespace) -> Plan:
    if not arguments.measure:
        if group.rank == 0:
            return _cheapest_table(task, group.topology, arguments.top)
        return cheapest(task, group.topology)
    if group.size == 1:
        raise ArgumentError(
            "one rank has nothing to measure; start this as a job: multiring run -n 2 -- multiring plan"
        )
    tried = ranked(task, group.topology, arguments.top)
    drain_s = arguments.drain if len(group.topology.hosts) > 1 else 0.0
    others = OtherWork(group)
    times = time_plans(group, task, tried, seconds=arguments.seconds, drain_s=drain_s)
    beside = others.taken()
    fastest = min(zip(times, range(len(tried)), strict=True))[1]
    if group.rank == 0:
        _table(task, tried, len(tried), times)
        if beside is not None:
            show(f"{beside}: the measured times are too long.")
    return tried[fastest]


def _cheapest_table(task: Task, topology: Topology, most: int) -> Plan:
    """Print a table of the `most` cheapest plans, and return the cheapest."""
    return _table(task, ranked(task, topology, most), count_of_plans(task, topology))


def _table(task: Task, plans: Sequence[Plan], count: int, times: Sequence[float] = ()) -> Plan:
    """Print a table of the first `plans` of `count`, and return the first plan."""
    rows = [[*(("measured ms", "of predicted") if times else ()), *_HEAD]]
    for at, plan in enumerate(plans):
        measured = [f"{times[at] * 1e3:.4g}", f"{times[at] / plan.predicted_seconds:.2f}"] if times else []
        rows.append([*measured, *_cells(plan)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    left = f", the first {len(plans)} of {count}" if count > len(plans) else ""
    ranks = plans[0].schedule.ranks
    show(f"\n{task.collective.value} of {size_text(task.size_bytes)} on {ranks} ranks{left}\n" + "\n".join(lines))
    return plans[0]


def _cells(plan: Plan) -> list[str]:
    schedule = plan.schedule
    return [
        f"{plan.predicted_seconds * 1e3:.4g}",
        schedule.algorithm,
        " x ".join(map(str, schedule.grid)) + (f" + {len(schedule.frame.joined)}" if schedule.frame.joined else ""),
        "-" if plan.segment_bytes is None else size_text(plan.segment_bytes),
        ":".join(map(str, schedule.shares)),
        plan.engine,
    ]


def _save(arguments: argparse.Namespace, topology: Topology, plans: Iterable[tuple[Task, Plan]]) -> None:
    found = list(plans)
    if arguments.draw is not None:
        write_figure(arguments.draw, rings(found[-1][1], topology))
    if arguments.save is not None:
        write_pins(arguments.save, found, topology)
