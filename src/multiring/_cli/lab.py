"""multiring lab: run a command on virtual hosts of this machine, with links of a chosen speed between them.

Hosts are called host0, host1, ..., and their interfaces rail0, rail1, .... A rate is like 1gbit or 250mbit and holds in
each direction. `multiring lab fault` injects a fault into a running lab: it freezes, thaws or kills a host, or cuts,
slows or mends its links. The lab ends with the command. The command needs root.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from multiring._cli.number_option import RANKS
from multiring._launch import CommandError
from multiring.errors import ArgumentError
from multiring.lab import LabOptions, LabPlan, Launcher, ask_lab, parse_rate, parse_slots, parse_timed, run_lab
from multiring.lab.faults import USAGE

_FAULTS = "; ".join(USAGE.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "multiring lab --hosts H [OPTIONS] -- CMD...\n       multiring lab fault [--lab NAME] FAULT..."
    parser.add_argument("--hosts", type=RANKS, metavar="H", help="number of hosts")
    parser.add_argument(
        "--slots", default="1", metavar="S", help="ranks on each host (default 1), or one number per host: 4,4,3,1"
    )
    parser.add_argument("--link", metavar="RATE", help="speed of every host's rail0 (default: no limit)")
    parser.add_argument("--rail", action="append", default=[], metavar="RATE", help="add a rail of this speed")
    parser.add_argument("--rack", type=RANKS, default=1, metavar="R", help="number of racks for the hosts (default 1)")
    parser.add_argument("--uplink", metavar="RATE", help="speed of each rack's uplink, per rail (default: no limit)")
    parser.add_argument(
        "--launcher",
        choices=[launcher.value for launcher in Launcher],
        default="multiring",
        help="the launcher that starts the ranks",
    )
    parser.add_argument(
        "--at",
        nargs=2,
        action="append",
        default=[],
        metavar=("SECONDS", "FAULT"),
        help=f"inject a fault after SECONDS: {_FAULTS}",
    )
    parser.add_argument(
        "--no-topology",
        action="store_true",
        help="do not describe racks, rails and rates to the ranks (MULTIRING_TOPOLOGY)",
    )
    parser.add_argument("--name", help="name of the lab (default: lab-PID)")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write each process's output to files in DIR")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="CMD...", help="the command of every rank")


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code.

    127: the command does not exist. 126: it cannot be executed.
    """
    program = arguments.program
    if program[:1] == ["fault"]:
        return _fault(program[1:])
    if arguments.hosts is None:
        raise ArgumentError("the number of hosts is missing: give it with --hosts H")
    rails = [arguments.link, *arguments.rail]
    plan = LabPlan(
        hosts=arguments.hosts,
        slots=parse_slots(arguments.slots),
        rails=tuple(None if rate is None else parse_rate(rate) for rate in rails),
        racks=arguments.rack,
        uplink=None if arguments.uplink is None else parse_rate(arguments.uplink),
    )
    options = LabOptions(
        launcher=Launcher(arguments.launcher),
        name=arguments.name or f"lab-{os.getpid()}",
        log_dir=arguments.log_dir,
        faults=tuple(parse_timed(seconds, words, plan) for seconds, words in arguments.at),
        tells_topology=not arguments.no_topology,
    )
    try:
        return run_lab(plan, program[1:] if program[:1] == ["--"] else program, options)
    except CommandError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code


def _fault(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="multiring lab fault", description="Inject a fault into a running lab.", allow_abbrev=False
    )
    parser.add_argument("--lab", metavar="NAME", help="name of the lab (default: the only running lab)")
    parser.add_argument("fault", nargs="+", metavar="FAULT", help=_FAULTS)
    arguments = parser.parse_args(words)
    ask_lab(arguments.lab, fault=arguments.fault)
    return 0
