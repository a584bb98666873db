"""The options of `multiring simulate` about hosts that fail, and the goodput under them."""

import argparse
from collections.abc import Sequence

from multiring._cli.number_option import number
from multiring._cli.simulation import Subject
from multiring._simulator.failures import Failures, elastic_goodput, restarted_goodput
from multiring._simulator.step import SimulatedStep, part_of, step_of
from multiring._topology import Topology
from multiring.errors import ArgumentError

_COMMIT_EVERY_S = 600.0
# The longest time from a host's silent loss to the next step of the others, with MULTIRING_WIRE_TIMEOUT_S=10:
# benchmarks/results/growing_hosts_2core_202611.md. After a kill it is 0.5 s in the median.
_GO_ON_S = 15.14
_COSTS = ("--commit-every", "--commit-seconds", "--restart-seconds", "--go-on-seconds")


def add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--failures-per-hour", type=number(0, 1e9), metavar="F", help="failures of one host in an hour, for the goodput"
    )
    parser.add_argument(
        "--restart-seconds",
        type=number(0, 1e9),
        metavar="S",
        help="with --failures-per-hour: until a failed host is replaced and the program runs again",
    )
    parser.add_argument(
        "--commit-every",
        type=number(0, 1e9, above=True),
        metavar="S",
        help=f"with --failures-per-hour: seconds of work between two commits (default: {_COMMIT_EVERY_S:g})",
    )
    parser.add_argument(
        "--commit-seconds",
        type=number(0, 1e9),
        metavar="S",
        help="with --failures-per-hour: seconds by which a commit delays the training (default: 0)",
    )
    parser.add_argument(
        "--go-on-seconds",
        type=number(0, 1e9),
        metavar="S",
        help=f"with --failures-per-hour: until an elastic job goes on (default: {_GO_ON_S:g}, measured)",
    )


def failures_of(arguments: argparse.Namespace) -> Failures | None:
    """Return what the options say; None without `--failures-per-hour`.

    Raises:
        ArgumentError: an option lacks another one, or a number is impossible.
    """
    given = {option: getattr(arguments, option[2:].replace("-", "_")) for option in _COSTS}
    if arguments.failures_per_hour is None:
        for option, value in given.items():
            if value is not None:
                raise ArgumentError(f"{option} {value:g}: want it with --failures-per-hour F only")
        return None
    if given["--restart-seconds"] is None:
        raise ArgumentError(
            "--failures-per-hour: want --restart-seconds S, too: how long it takes on your cluster to replace a failed "
            "host and to start the program there"
        )
    return Failures(
        per_hour=arguments.failures_per_hour,
        commit_every_s=_COMMIT_EVERY_S if given["--commit-every"] is None else given["--commit-every"],
        commit_s=given["--commit-seconds"] or 0.0,
        restart_s=given["--restart-seconds"],
        go_on_s=_GO_ON_S if given["--go-on-seconds"] is None else given["--go-on-seconds"],
    )


def goodputs(
    failures: Failures, steps: Sequence[SimulatedStep], subject: Subject, topology: Topology
) -> list[dict[str, float]]:
    """Return, for each step, the goodput of a job that is restarted and of an elastic one.

    Args:
        failures: how often hosts fail.
        steps: steps on parts of the cluster.
        subject: the training.
        topology: the whole cluster.
    """
    return [_goodput(failures, step, subject, part_of(topology, step.ranks)) for step in steps]


def _goodput(failures: Failures, step: SimulatedStep, subject: Subject, cluster: Topology) -> dict[str, float]:
    def rate_of(hosts: int) -> float:
        part = part_of(cluster, sum(map(len, cluster.hosts[:hosts])))
        return step_of(subject.profile(part.ranks, subject.batch_per_rank, subject.exchange), part).samples_per_s

    return {
        "restarted_goodput": restarted_goodput(failures, step.hosts),
        "elastic_goodput": elastic_goodput(failures, step.hosts, rate_of),
    }


def failures_remark(failures: Failures) -> str:
    """Return the assumptions as a line."""
    return (
        f"Goodput: the part of the work that gets done if each host fails {failures.per_hour:g} times an hour, with a "
        f"commit every {failures.commit_every_s:g} s. A job that is restarted stands still for "
        f"{failures.restart_s:g} s; an elastic job goes on after {failures.go_on_s:g} s, without the host for so long."
    )
