"""multiring doctor: find what is wrong with the hosts and links of a job, within 30 seconds.

On one host, run it alone. On several hosts, name them (--hosts a,b,c), or start it as the ranks of a job, by any
launcher: srun multiring doctor. Rank 0 prints what it found, how sure that is, and what to do. Exit codes: 0 healthy,
1 something is wrong, 2 it could not look.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from multiring._cli.data import size_of
from multiring._cli.output import show
from multiring._diagnosis.doctor import DoctorOptions, check_job
from multiring._diagnosis.readings import Needs
from multiring._diagnosis.report import (
    COULD_NOT_LOOK,
    FOUND,
    HealthReport,
    as_json,
    as_text,
    finding_as_json,
    findings_text,
)
from multiring._diagnosis.run_record import record_findings
from multiring._diagnosis.slow_run import read_timeline, run_findings
from multiring._settings import Settings, foreign_environment
from multiring.errors import ArgumentError, MultiringError

_NEEDS = Needs()
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-n", type=int, metavar="N", help="number of ranks that each host is to have (default: as the check has)"
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
        type=int,
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

    if arguments.n is not None and arguments.n < 1:
        raise ArgumentError(f"-n {arguments.n}: want at least 1 rank")
    if arguments.need_files < 0:
        raise ArgumentError(f"--need-files {arguments.need_files}: want 0 or more descriptors")
    needs = Needs(memory_bytes=arguments.need_memory, shm_bytes=arguments.need_shm, files=arguments.need_files)
    options = DoctorOptions(needs=needs, planned=arguments.n, stuck=stuck)
    try:
        report = check_job(Settings.from_environment(), foreign_environment(), options)
    except MultiringError as error:
        print(f"multiring: could not look: {error}", file=sys.stderr)
        return COULD_NOT_LOOK
    if report is None:
        return 0
    _print(report, as_object=arguments.json)
    return report.code


def _of_records(arguments: argparse.Namespace) -> int:
    """Look at what a run has left; no host is looked at."""
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
