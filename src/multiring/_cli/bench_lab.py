"""Run the bench in a lab.

The jobs of the bench run on virtual hosts, and the speed of the hosts' links sets bounds for the results.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

from multiring._bench.cases import Question
from multiring._bench.compare import Bound
from multiring._bench.libraries import LabCommand
from multiring._bench.machine import commit, hardware, ping_pong_us
from multiring._bench.records import Circumstances
from multiring._cli.number_option import RANKS
from multiring.errors import ArgumentError
from multiring.lab import Lab, LabPlan, parse_rate
from multiring.lab.goodput import Flow, goodput
from multiring.lab.machine import require_root
from multiring.lab.plan import rate_text

_T = TypeVar("_T")


def add_options(group: "argparse._ArgumentGroup") -> None:
    """Declare the options that describe a lab."""
    group.add_argument("--hosts", type=RANKS, metavar="H", help="number of virtual hosts, as in multiring lab")
    group.add_argument("--slots", type=RANKS, metavar="S", help="ranks on each host (default 1)")
    group.add_argument("--link", metavar="RATE", help="speed of every host's link, like 1gbit (default: no limit)")
    group.add_argument("--rail", action="append", default=[], metavar="RATE", help="add a rail of this speed")
    group.add_argument("--rack", type=RANKS, metavar="R", help="number of racks for the hosts (default 1)")
    group.add_argument("--uplink", metavar="RATE", help="speed of each rack's uplink, per rail (default: no limit)")


def plan_of(arguments: argparse.Namespace) -> LabPlan | None:
    """Return the plan of the lab that `arguments` describe, or None for no lab.

    Raises:
        ArgumentError: there is an option of a lab without --hosts, or the lab is impossible.
        UnsupportedError: the user is not root.
    """
    if arguments.hosts is None:
        for name in ("slots", "link", "rail", "rack", "uplink"):
            if getattr(arguments, name):
                raise ArgumentError(f"--{name} needs a lab: give its number of hosts with --hosts H")
        return None
    plan = LabPlan(
        hosts=arguments.hosts,
        slots=1 if arguments.slots is None else arguments.slots,
        rails=tuple(None if rate is None else parse_rate(rate) for rate in [arguments.link, *arguments.rail]),
        racks=1 if arguments.rack is None else arguments.rack,
        uplink=None if arguments.uplink is None else parse_rate(arguments.uplink),
    )
    require_root()
    return plan


def ranks_of(arguments: argparse.Namespace, plan: LabPlan | None) -> int:
    """Return the number of ranks of the lab; without a lab, return --ranks (default 2).

    Raises:
        ArgumentError: there is a lab, and --ranks is given too.
    """
    if plan is None:
        return 2 if arguments.ranks is None else int(arguments.ranks)
    if arguments.ranks is not None:
        raise ArgumentError(
            f"--ranks {arguments.ranks}: in a lab the number of ranks is --hosts times --slots; omit --ranks"
        )
    return plan.num_ranks


def against_of(arguments: argparse.Namespace) -> list[str] | None:
    """Return the libraries that --against names, or None if the option is not given."""
    if arguments.against is None:
        return None
    return [] if arguments.against == "none" else list(arguments.against.split(","))


def circumstances_of(plan: LabPlan | None) -> Circumstances:
    """Return the hardware, commit, command and network of the measurement."""
    return Circumstances(
        hardware=hardware(),
        commit=commit(),
        command=shlex.join(["multiring", *sys.argv[1:]]),
        ping_pong_us=ping_pong_us(),
        network="" if plan is None else network_text(plan),
    )


def command_of(plan: LabPlan) -> LabCommand:
    """Return a function that makes the command line of a job in a new lab.

    The function takes a launcher's name, and returns the words before the job's own command.
    """
    words = ["--hosts", str(plan.hosts), "--slots", plan.slots_text, "--rack", str(plan.racks)]
    for option, rate in zip(["--link", *["--rail"] * (plan.num_rails - 1)], plan.rails, strict=True):
        if rate is not None:
            words += [option, f"{rate}bit"]
    if plan.uplink is not None:
        words += ["--uplink", f"{plan.uplink}bit"]

    def command(launcher: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "multiring", "lab", *words, "--launcher", launcher, "--")

    return command


def network_text(plan: LabPlan) -> str:
    """Return a description of the lab in one line."""
    rails = ", ".join(rate_text(rate) for rate in plan.rails)
    racks = f", {plan.racks} racks with uplinks of {rate_text(plan.uplink)}" if plan.racks > 1 else ""
    return f"lab of {plan.hosts} hosts x {plan.slots_text} ranks, links of {rails}{racks}"


@dataclass(frozen=True, slots=True)
class Wires:
    """The goodput of plain sockets in a lab, in bytes per second.

    `host` is for all links of a host together, and `rack` for a rack's uplinks.
    """

    host: float
    rack: float | None


def wires_of(plan: LabPlan) -> Wires | None:
    """Measure the goodput of a lab's links while all hosts send.

    Return None for a single host, which has no links.

    All links of a kind have the same speed, and differences are chance, so the result is the median.
    """
    if plan.hosts == 1:
        return None
    racks = [[host for host in range(plan.hosts) if plan.rack_of(host) == rack] for rack in range(plan.racks)]
    neighbours = [(host, _next(rack, host)) for rack in racks for host in rack if len(rack) > 1]
    # Use just enough flows to fill an uplink, because more flows would only cause packet loss.
    across: list[tuple[int, int]] = []
    for rack in racks if plan.racks > 1 else []:
        others = cycle(_next(racks, rack))
        across += [(host, next(others)) for host in rack[: _senders(plan)]]
    with Lab(plan) as lab:
        within, between = (_rates(lab, pairs) for pairs in (neighbours, across))
    leaving = [sum(rate for host, rate in between.items() if host in rack) for rack in racks]
    return Wires(
        host=statistics.median(within.values()) if within else float("inf"),
        rack=statistics.median(leaving) if between else None,
    )


def _senders(plan: LabPlan) -> int:
    """Return the number of hosts that together fill an uplink."""
    (link, *_) = plan.rails
    if plan.uplink is None:
        return plan.hosts
    return 1 if link is None else -(-plan.uplink // link)


def _next(ring: Sequence[_T], one: _T) -> _T:
    return ring[(ring.index(one) + 1) % len(ring)]


def _rates(lab: Lab, pairs: list[tuple[int, int]]) -> dict[int, float]:
    """Return the goodput of each sending host over all rails together; `pairs` are (sender, receiver)."""
    flows = [Flow(source, target, rail) for rail in range(lab.plan.num_rails) for source, target in pairs]
    rates = goodput(lab, flows) if flows else []
    totals: dict[int, float] = {}
    for flow, rate in zip(flows, rates, strict=True):
        totals[flow.source] = totals.get(flow.source, 0.0) + rate
    return totals


def bound(question: Question, plan: LabPlan, wires: Wires) -> Bound | None:
    """Return the bandwidth at which a host's links or a rack's uplinks are full.

    It is an algorithm bandwidth (bytes of a buffer per second), and holds for any algorithm.

    With H hosts and n bytes per rank, at least this number of bytes must leave or enter some host:

    - all_reduce: 2n(H - 1)/H (Patarasuk & Yuan, JPDC 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002, applied to hosts in
      place of ranks, because nothing is sent over a link within a host)
    - reduce_scatter and all_gather: n(H - 1)/H
    - broadcast: n
    - all_to_all: n(H - 1)/H for each rank of the host

    The same formulas hold for racks.
    """
    bounds = [_bound(question.collective, "hosts", plan.hosts, plan.num_ranks // plan.hosts, wires.host)]
    if wires.rack is not None:
        ranks = plan.num_ranks // plan.racks
        bounds.append(_bound(question.collective, "racks", plan.racks, ranks, wires.rack))
    known = [each for each in bounds if each is not None]
    if not known:
        return None
    lowest = min(known, key=lambda each: each.bytes_per_s)
    return Bound(lowest.bytes_per_s, "; ".join(each.formula for each in known))


def _bound(collective: str, what: str, parties: int, ranks_of_each: int, bytes_per_s: float) -> Bound | None:
    others = (parties - 1) / parties
    shares = {
        "all_reduce": (2 * others, f"2 ({parties} - 1) / {parties}"),
        "reduce_scatter": (others, f"({parties} - 1) / {parties}"),
        "all_gather": (others, f"({parties} - 1) / {parties}"),
        "broadcast": (1.0, "1"),
        "all_to_all": (others * ranks_of_each, f"{ranks_of_each} ({parties} - 1) / {parties}"),
    }
    if collective not in shares:
        return None
    share, text = shares[collective]
    algbw = bytes_per_s / share
    return Bound(algbw, f"{what} {bytes_per_s / 1e6:.1f} MB/s / ({text}) = {algbw / 1e6:.1f} MB/s")
