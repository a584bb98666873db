"""multiring data plan without a data set: how long it takes to bring one to a machine's hosts, by bounds alone."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from multiring.data.forecast import RackOfHosts, Site, each_for_itself, read_once
from multiring.errors import ArgumentError
from multiring.runtime.rails.topology_file import read_topology


def add_paper_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what says a machine and a data set on paper."""
    paper = parser.add_argument_group("on paper, for a data set that is not here")
    paper.add_argument("--topology", type=Path, metavar="FILE", help="a topology file that names the hosts")
    paper.add_argument("--samples", type=int, metavar="N", help="samples that each host is to hold")
    paper.add_argument("--sample-bytes", type=float, metavar="B", help="of one of them")
    paper.add_argument("--data-samples", type=int, metavar="N", help="of the data set (default: all hosts' differ)")
    paper.add_argument("--source-rate", type=float, metavar="B/S", help="bytes a second that the source gives")
    paper.add_argument("--disk-rate", type=float, metavar="B/S", help="bytes a second that a host's disk writes")


_ON_PAPER = ("topology", "samples", "sample_bytes", "data_samples", "source_rate", "disk_rate")


def require_no_paper(arguments: argparse.Namespace) -> None:
    """Raise ArgumentError where a data set is given, and options that are for a plan without one."""
    given = [f"--{name.replace('_', '-')}" for name in _ON_PAPER if getattr(arguments, name) is not None]
    if given:
        raise ArgumentError(
            f"data plan {arguments.url} with {', '.join(given)}: want a data set, or a plan on paper without one; "
            "these options have no effect on a data set that is there"
        )


def on_paper(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a forecast.

    Raises:
        ArgumentError: something it needs is missing, or makes no sense.
    """
    without = [f"--{name}" for name in ("format", "cache") if getattr(arguments, name) is not None]
    if without:
        raise ArgumentError(f"{', '.join(without)} without a data set: want one, or a plan on paper without them")
    needed = ("topology", "samples", "sample_bytes", "source_rate")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(arguments, name) is None]
    if missing:
        raise ArgumentError(f"want a data set, or on paper also {', '.join(missing)}")
    topology = read_topology(arguments.topology)
    if not topology.names:
        raise ArgumentError(f"--topology {arguments.topology} names no hosts: add [[hosts]]")
    few = arguments.data_samples is not None and arguments.data_samples < 1
    if arguments.samples < 1 or few or not 0 < arguments.sample_bytes < float("inf"):
        told = f"{arguments.samples}, {arguments.sample_bytes:g}, {arguments.data_samples}"
        raise ArgumentError(f"--samples, --sample-bytes, --data-samples: {told}; want more than 0")
    hosts = len(topology.names)
    # The slowest host: all are to have theirs.
    rate = min(sum(rail.bandwidth_bytes_per_s for rail in topology.rails_of(host)) for host in range(hosts))
    disk = float("inf") if arguments.disk_rate is None else arguments.disk_rate
    # A rail that nothing narrows leaves a rack's way open.
    racks = tuple(
        RackOfHosts(
            hosts=len(rack.hosts),
            rate=sum(float("inf") if link is None else link.bandwidth_bytes_per_s for link in rack.uplinks),
        )
        for rack in topology.racks
        if rack.uplinks
    )
    if len(racks) < len(topology.racks):  # the racks without a limit get and give all they want
        racks = (
            (*racks, RackOfHosts(hosts=hosts - sum(each.hosts for each in racks), rate=float("inf"))) if racks else ()
        )
    site = Site(hosts=hosts, source=arguments.source_rate, down=rate, up=rate, write=disk, racks=racks)
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
