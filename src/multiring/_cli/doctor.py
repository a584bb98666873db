"""multiring doctor: find what is wrong with the hosts and links of a job, within 30 seconds.

On one host, run it alone. On several hosts, name them (--hosts a,b,c), or start it as the ranks of a job, by any
launcher: srun multiring doctor. Rank 0 prints what it found, how sure that is, and what to do. Exit codes: 0 healthy,
1 something is wrong, 2 it could not look.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from multiring._cli.data import size_of
from multiring._cli.number_option import RANKS, whole
from multiring._cli.output import show
from multiring._diagnosis.doctor import DoctorOptions, check_job
from multiring._diagnosis.over_ssh import answering, check_over_ssh, planned_hosts
from multiring._diagnosis.readings import Absence, Needs, Readings
from multiring._diagnosis.report import (
    COULD_NOT_LOOK,
    FOUND,
    HealthReport,
    as_json,
    as_text,
    finding_as_json,
    findings_text,
)
from multiring._diagnosis.rules import findings_of
from multiring._diagnosis.run_record import record_findings
from multiring._diagnosis.slow_run import read_timeline, run_findings
from multiring._settings import Settings, become_rank, foreign_environment
from multiring.errors import ArgumentError, MultiringError

_NEEDS = Needs()
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--hosts", metavar="HOSTS", help="check these hosts, by ssh: a,b, or with numbers of ranks: a:4,b:4"
    )
    parser.add_argument("--told", action="store_true", help=argparse.SUPPRESS)  # the place comes by standard input
    parser.add_argument(
        "-n", type=RANKS, metavar="N", help="number of ranks that each host is to have (default: as the check has)"
    )
    parser.add_argument(
        "--need-memory",
        type=size_of,
        default=_NEEDS.memory_bytes,
        metavar="SIZE",
        help=f"free memory that a host must have (default {_NEEDS.memory_bytes // _MIB}MiB)",
    )
    parser.add_argument(
        "--need-shm",
        type=size_of,
        default=_NEEDS.shm_bytes,
        metavar="SIZE",
        help=f"free space that /dev/shm must have (default {_NEEDS.shm_bytes // _MIB}MiB)",
    )
    parser.add_argument(
        "--need-files",
        type=whole(0),
        default=_NEEDS.files,
        metavar="N",
        help=f"descriptors that a rank must be able to open (default {_NEEDS.files})",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="name the straggler and the phase of a run that was slow"
    )
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="read the record of a run of multiring.training")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all readings")


def run(arguments: argparse.Namespace) -> int:
    """Check, print the report and return the exit code."""
    if arguments.timeline is not None or arguments.run is not None:
        return _of_records(arguments)

    def stuck(report: HealthReport | None) -> None:
        if report is not None:
            _print(report, as_object=arguments.json)
        sys.stdout.flush()
        os._exit(FOUND if report is not None else 0)  # another thread waits inside MPI, which nothing can interrupt

    needs = Needs(memory_bytes=arguments.need_memory, shm_bytes=arguments.need_shm, files=arguments.need_files)
    options = DoctorOptions(needs=needs, planned=arguments.n, stuck=stuck)
    try:
        if arguments.hosts is not None:
            return _over_ssh(arguments)
        if arguments.told:
            options = _told(options)
        report = check_job(Settings.from_environment(), foreign_environment(), options)
    except MultiringError as error:
        print(f"multiring: could not look: {error}", file=sys.stderr)
        return COULD_NOT_LOOK
    if report is None:
        return 0
    _print(report, as_object=arguments.json)
    return report.code


def _told(options: DoctorOptions) -> DoctorOptions:
    """Take the place in the job that the launching doctor sends, and return the options that it sends."""
    told = json.loads(sys.stdin.readline())
    become_rank(told["variables"])
    absent = tuple(Absence(**each) for each in told["absent"])
    return replace(options, peers=tuple(told["peers"]), planned=told["planned"], absent=absent)


def _over_ssh(arguments: argparse.Namespace) -> int:
    """Start a checker on each host, and print what rank 0 prints."""
    settings = Settings.from_environment()
    hosts = planned_hosts(arguments.hosts, arguments.n)
    found, absent = answering(hosts)
    if not found:
        readings = Readings(hosts=(), absent=tuple(absent))
        report = HealthReport(readings=readings, findings=findings_of(readings, _NEEDS), seconds=0.0)
        _print(report, as_object=arguments.json)
        return report.code
    words = ["--need-memory", str(arguments.need_memory), "--need-shm", str(arguments.need_shm)]
    words += ["--need-files", str(arguments.need_files), *(["--json"] if arguments.json else [])]
    remote = check_over_ssh(found, absent, words, settings)
    if remote.output:
        show(remote.output.rstrip())
    if remote.code is not None and remote.output:
        return remote.code
    why = remote.said or "it gave no report"
    print(f"multiring: could not look: rank 0 on {found[0].name}: {why}", file=sys.stderr)
    return COULD_NOT_LOOK


def _of_records(arguments: argparse.Namespace) -> int:
    """Look at what a run has left; no host is looked at."""
    for option, value in (("--hosts", arguments.hosts), ("-n", arguments.n)):
        if value is not None:
            raise ArgumentError(
                f"{option} {value} with --timeline or --run: what a run has left is looked at, and no host; leave out "
                f"{option}, or check the hosts by a command of its own"
            )
    found = []
    try:
        if arguments.timeline is not None:
            found += run_findings(read_timeline(arguments.timeline))
        if arguments.run is not None:
            found += record_findings(arguments.run)
    except MultiringError as error:
        print(f"multiring: could not look: {error}", file=sys.stderr)
        return COULD_NOT_LOOK
    if arguments.json:
        show(json.dumps({"code": FOUND if found else 0, "findings": [finding_as_json(each) for each in found]}))
    else:
        show("\n".join(findings_text(found) or ["nothing is wrong"]))
    return FOUND if found else 0


def _print(report: HealthReport, *, as_object: bool) -> None:
    show(json.dumps(as_json(report)) if as_object else as_text(report))
