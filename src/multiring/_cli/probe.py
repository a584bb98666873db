"""multiring probe: measure the cost of the links between a job's ranks, in seconds.

Every rank runs the command, under any launcher: mpiexec -n 8 multiring probe --save topology.toml. Rank 0 prints the
topology and writes the file. It also names hosts and interfaces that are slower than their peers or than stated.
"""

import argparse
import sys
from pathlib import Path

from multiring._cli.number_option import PAUSE, SECONDS
from multiring._cli.output import show
from multiring._probe import probe
from multiring._runtime import init, shutdown
from multiring._runtime.rails.topology_file import check_topology, write_topology
from multiring._settings import Settings
from multiring._topology import text_of
from multiring.errors import ArgumentError

_SLOW = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the topology there, for MULTIRING_TOPOLOGY")
    parser.add_argument(
        "--seconds", type=SECONDS, default=0.5, metavar="S", help="time each transfer for S (default 0.5)"
    )
    parser.add_argument(
        "--drain",
        type=PAUSE,
        default=0.5,
        metavar="S",
        help="run each transfer for S before timing it, because a link may pass bursts faster (default 0.5)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Probe the links.

    Return 1 on rank 0 if a host or an interface is slower than its peers or than stated, else 0.
    """
    if arguments.save is not None:
        check_topology(arguments.save)
    # One thread cannot fill a fast link, and would be measured in its place.
    group = init() if Settings.from_environment().connections is not None else init(connections=0)
    try:
        if group.size == 1:
            raise ArgumentError(
                "one rank has no links to measure; start this as a job: multiring run -n 2 -- multiring probe"
            )
        found = probe(group, seconds=arguments.seconds, drain_s=arguments.drain)
        if group.rank == 0:
            heading = f"Measured by multiring probe on {found.topology}."
            if found.beside is not None:
                heading += f"\n{found.beside}: the links are faster than these figures."
            show(text_of(found.topology, heading).rstrip())
            for warning in found.warnings:
                print(f"multiring: {warning}", file=sys.stderr)
            if arguments.save is not None:
                write_topology(arguments.save, found.topology, heading)
        group.barrier()
        return _SLOW if found.warnings and group.rank == 0 else 0
    finally:
        shutdown()
