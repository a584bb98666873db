"""multiring data plan without a data set: a forecast from bounds.

The forecast is the time to bring a data set to the hosts of a machine.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from multiring._cli.number_option import AMOUNT, MOST_BYTES, whole
from multiring._runtime.rails.topology_file import read_topology
from multiring.errors import ArgumentError
from multiring.planner.staging import each_for_itself, read_once, site_of


def add_paper_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a machine and a data set on paper."""
    paper = parser.add_argument_group("on paper, without a data set")
    paper.add_argument("--topology", type=Path, metavar="FILE", help="a topology file that names the hosts")
    paper.add_argument(
        "--samples", type=whole(1, MOST_BYTES), metavar="N", help="number of samples that each host will hold"
    )
    paper.add_argument("--sample-bytes", type=AMOUNT, metavar="B", help="bytes of one sample")
    paper.add_argument(
        "--data-samples",
        type=whole(1, MOST_BYTES),
        metavar="N",
        help="samples of the data set (default: no two hosts hold the same)",
    )
    paper.add_argument("--source-rate", type=AMOUNT, metavar="B/S", help="bytes per second that the source delivers")
    paper.add_argument("--disk-rate", type=AMOUNT, metavar="B/S", help="bytes per second that a host's disk writes")


_ON_PAPER = ("topology", "samples", "sample_bytes", "data_samples", "source_rate", "disk_rate")


def require_no_paper(arguments: argparse.Namespace) -> None:
    """Raise ArgumentError if options of a paper plan accompany a data set."""
    given = [f"--{name.replace('_', '-')}" for name in _ON_PAPER if getattr(arguments, name) is not None]
    if given:
        raise ArgumentError(
            f"data plan {arguments.url} with {', '.join(given)}: these options are for a plan on paper, without a "
            "data set; omit them, or the data set"
        )


def on_paper(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a forecast for the described machine and data set.

    Raises:
        ArgumentError: a needed option is missing or has an invalid value.
    """
    without = [f"--{name}" for name in ("format", "cache") if getattr(arguments, name) is not None]
    if without:
        raise ArgumentError(
            f"{', '.join(without)} without a data set: name a data set, or omit these options for a plan on paper"
        )
    needed = ("topology", "samples", "sample_bytes", "source_rate")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(arguments, name) is None]
    if missing:
        raise ArgumentError(f"a plan on paper also needs {', '.join(missing)}; or name a data set")
    topology = read_topology(arguments.topology)
    if not topology.names:
        raise ArgumentError(f"--topology {arguments.topology} names no hosts: add [[hosts]]")
    hosts = len(topology.names)
    disk = float("inf") if arguments.disk_rate is None else arguments.disk_rate
    site = site_of(topology, source=arguments.source_rate, write=disk)
    held = arguments.samples * arguments.sample_bytes
    distinct = held * hosts if arguments.data_samples is None else arguments.data_samples * arguments.sample_bytes
    each = f"{arguments.samples} samples of {arguments.sample_bytes / 1e6:g} MB"
    yield f"{hosts} hosts, {each} on each: {held / 1e9:.4g} GB"
    for name, forecast in (
        ("every host reads for itself", each_for_itself(site, distinct, held)),
        ("read once and passed on", read_once(site, distinct, held)),
        ("the data once across all hosts", read_once(site, distinct, min(held, distinct / hosts))),
    ):
        read = f"{forecast.source_bytes / 1e12:.4g} TB from the source"
        yield f"{name + ':':32} {forecast.seconds:10.1f} s, bounded by {forecast.bound}; {read}"
