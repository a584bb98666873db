"""The bench in a lab: how its jobs are started there, and what its wires allow."""

import argparse
import sys

from multiring.bench.cases import Question
from multiring.bench.libraries import LabCommand
from multiring.errors import ArgumentError
from multiring.lab import Lab, Plan, parse_rate
from multiring.lab.goodput import Flow, goodput
from multiring.lab.machine import require_root
from multiring.lab.plan import rate_text


def add_options(group: "argparse._ArgumentGroup") -> None:
    """Declare the options that make it a lab."""
    group.add_argument("--hosts", type=int, metavar="H", help="virtual hosts, as multiring lab makes them")
    group.add_argument("--slots", type=int, metavar="S", help="ranks on each (default 1)")
    group.add_argument("--link", metavar="RATE", help="speed of every host's link, like 1gbit (default: no limit)")
    group.add_argument("--rail", action="append", default=[], metavar="RATE", help="one more rail of that speed")
    group.add_argument("--rack", type=int, metavar="R", help="how many racks the hosts stand in (default 1)")
    group.add_argument("--uplink", metavar="RATE", help="speed of each rack's uplink, per rail (default: no limit)")


def plan_of(arguments: argparse.Namespace) -> Plan | None:
    """Return the lab that was asked for, or None.

    Raises:
        ArgumentError: an option of a lab without hosts, or no such lab can be.
        UnsupportedError: not root.
    """
    if arguments.hosts is None:
        for name in ("slots", "link", "rail", "rack", "uplink"):
            if getattr(arguments, name):
                raise ArgumentError(f"--{name} is a lab's: say how many hosts it has with --hosts H")
        return None
    plan = Plan(
        hosts=arguments.hosts,
        slots=1 if arguments.slots is None else arguments.slots,
        rails=tuple(None if rate is None else parse_rate(rate) for rate in [arguments.link, *arguments.rail]),
        racks=1 if arguments.rack is None else arguments.rack,
        uplink=None if arguments.uplink is None else parse_rate(arguments.uplink),
    )
    require_root()
    return plan


def command_of(plan: Plan) -> LabCommand:
    """Return what makes the command line of a job in a lab of its own, up to the ranks'."""
    words = ["--hosts", str(plan.hosts), "--slots", str(plan.slots), "--rack", str(plan.racks)]
    for option, rate in zip(["--link", *["--rail"] * (plan.num_rails - 1)], plan.rails, strict=True):
        if rate is not None:
            words += [option, f"{rate}bit"]
    if plan.uplink is not None:
        words += ["--uplink", f"{plan.uplink}bit"]

    def command(launcher: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "multiring", "lab", *words, "--launcher", launcher, "--")

    return command


def network_text(plan: Plan) -> str:
    """Return the lab in words."""
    rails = ", ".join(rate_text(rate) for rate in plan.rails)
    racks = f", {plan.racks} racks with uplinks of {rate_text(plan.uplink)}" if plan.racks > 1 else ""
    return f"lab of {plan.hosts} hosts x {plan.slots} ranks, links of {rails}{racks}"


def goodput_of(plan: Plan) -> float | None:
    """Return the bytes per second that plain sockets get out of a host, all hosts sending to the next one, all rails.

    None for one host, and where racks share uplinks: a ring does not show what those carry.
    """
    if plan.hosts == 1 or plan.racks > 1:
        return None
    flows = [Flow(host, (host + 1) % plan.hosts, rail) for rail in range(plan.num_rails) for host in range(plan.hosts)]
    with Lab(plan) as lab:
        rates = goodput(lab, flows)
    hosts = [sum(rates[flow] for flow in range(host, len(flows), plan.hosts)) for host in range(plan.hosts)]
    return min(hosts)


def bound(question: Question, plan: Plan, goodput_bytes_per_s: float) -> float | None:
    """Return the algbw at which a host's link is full, whatever the algorithm.

    With H hosts and n bytes a rank, at least so many bytes leave, or enter, some host: all_reduce 2n(H - 1)/H
    (Patarasuk & Yuan, JPDC 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002, with hosts for ranks: within them nothing is
    sent), reduce_scatter and all_gather n(H - 1)/H, broadcast n, all_to_all n(H - 1)/H of each of its slots.
    """
    others = (plan.hosts - 1) / plan.hosts
    shares = {
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "all_gather": others,
        "broadcast": 1.0,
        "all_to_all": others * plan.slots,
    }
    share = shares.get(question.collective)
    return None if share is None else goodput_bytes_per_s / share
