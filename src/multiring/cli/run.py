"""multiring run: start a command as N ranks on this machine, or with --hosts on several, by the mpiexec on PATH.

Every output line is tagged with its rank. When a rank fails, its last lines are shown, the others are stopped,
and its exit code is returned (128 + n for signal n). Nothing the job started is left behind. On several hosts
all that is mpiexec's business. With --horovod, a program that imports horovod gets multiring (docs/horovod.md); with
--timeline, what all ranks did is in one file (docs/timeline.md).
"""

import argparse
import sys
from pathlib import Path

from multiring.errors import ArgumentError
from multiring.launch import CommandError, horovod_without_effect, run_local, run_over_hosts
from multiring.trace import clear, file_path, merge, part_path, parts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "multiring run (-n N | --hosts H:N,...) [--horovod] [--timeline FILE] [--log-dir DIR] [--] CMD..."
    parser.add_argument("-n", dest="ranks", type=_count, metavar="N", help="how many ranks")
    parser.add_argument("--hosts", metavar="H:N,...", help="how many on which host, by the mpiexec on PATH")
    parser.add_argument("--horovod", action="store_true", help="let the ranks take multiring for Horovod")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write what every rank does, for Perfetto; .gz too"
    )
    parser.set_defaults(refuse=parser.error)
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank-K.out and DIR/rank-K.err")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="CMD...", help="what every rank runs")


def run(arguments: argparse.Namespace) -> int:
    """Exit with the job's code; 127 where the command does not exist, 126 where it cannot be executed."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if arguments.ranks is None and arguments.hosts is None:
        arguments.refuse("how many ranks? say -n N, or --hosts H:N,... for several hosts")
    for name, reason in horovod_without_effect().items() if arguments.horovod else ():
        print(f"multiring: {name} has no effect: {reason}", file=sys.stderr)
    options = {"log_dir": arguments.log_dir, "horovod": arguments.horovod}
    if arguments.timeline is not None:
        options["timeline"] = file_path(arguments.timeline)
        clear(options["timeline"])
    try:
        if arguments.hosts is not None:
            return run_over_hosts(program, arguments.hosts, arguments.ranks, **options)
        return run_local(program, arguments.ranks, **options)
    except CommandError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if "timeline" in options:
            _make_do_with_parts(options["timeline"])


def _make_do_with_parts(path: Path) -> None:
    """Write the timeline of a job whose rank 0 did not come to it, from the parts that are here."""
    left = parts_of(path)
    if not left:
        return
    names = ", ".join(str(each) for each in left)
    if part_path(path, 0) not in left:
        print(f"multiring: not in the timeline, as rank 0 wrote it without: {names}", file=sys.stderr)
        return
    try:
        missing = merge(left, path)
    except (ArgumentError, OSError) as error:
        print(f"multiring: no timeline could be made of {names}: {error}", file=sys.stderr)
        return
    for each in left:
        each.unlink(missing_ok=True)
    lacks = f"; it lacks ranks {', '.join(map(str, missing))}" if missing else ""
    print(f"multiring: {path} is made of what the ranks had written before they ended{lacks}", file=sys.stderr)


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} ranks make no job, want an integer >= 1")
    return count
