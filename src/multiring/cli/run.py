"""multiring run: start a command as N ranks on this machine, or with --hosts on several, by the mpiexec on PATH.

A Python file is started with this Python. Every output line is tagged with its rank. When a rank fails, its last lines
are shown, the others are stopped, and its exit code is returned (128 + n for signal n). After Ctrl-C or SIGTERM the
ranks have --grace seconds to save their work; a second one ends them at once. Nothing the job started is left behind.
On several hosts all that is mpiexec's business. With --horovod, a program that imports horovod gets multiring
(docs/horovod.md); with --timeline, what all ranks did is in one file (docs/timeline.md). docs/run.md has all of it.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from multiring.cli.run_file import read_options
from multiring.errors import ArgumentError
from multiring.launch import (
    CommandError,
    JobOptions,
    horovod_without_effect,
    parse_hostfile,
    run_local,
    run_over_hosts,
)
from multiring.settings import inherited_environment
from multiring.trace import TakenError, clear, file_path, is_held, merge, part_path, parts_of, unfinished_of

# What others' launchers call what we call otherwise.
_ELSEWHERE = {
    "-n N": (
        "-np",
        "--np",
        "--num-proc",
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        "--num-processes",
        "--num_processes",
        "--ntasks",
    ),
    "--hosts H:N,...": ("-H", "--host", "--nnodes", "--nodes", "--num-machines", "--num_machines"),
    "--hostfile FILE": ("-hostfile", "--machinefile", "-machinefile", "-f"),
    "MULTIRING_RENDEZVOUS=HOST:PORT in its environment": ("--master-addr", "--master_addr", "--main_process_ip"),
    "--log-dir DIR": ("--output-filename", "--log_dir"),
    "-- python -m MODULE, behind the options": ("-m", "--module"),
}


class _OthersOption(argparse.Action):
    """An option of another launcher, which is answered with ours."""

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        option = others[-1]
        ours = next(ours for ours, theirs in _ELSEWHERE.items() if option in theirs)
        parser.error(f"{option} is another launcher's; here it is: {ours}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "multiring run (-n N | --hosts H:N,... | --hostfile FILE) [OPTIONS] [--] PROGRAM [ARGUMENTS...]"
    parser.add_argument("-n", dest="ranks", type=_count, metavar="N", help="how many ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="H:N,...", help="how many on which host, by the mpiexec on PATH")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="the same from lines like: a slots=4")
    parser.add_argument("--horovod", action="store_true", default=None, help="let the ranks take multiring for Horovod")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write what every rank does, for Perfetto; .gz too"
    )
    parser.add_argument(
        "--env", action="append", metavar="NAME=VALUE", help="set a variable for the ranks; NAME alone: hand it on"
    )
    parser.add_argument("--stdin", type=int, metavar="RANK", help="the rank that reads standard input, as pdb does")
    parser.add_argument(
        "--grace", type=float, metavar="S", help="seconds to save work in after Ctrl-C or SIGTERM (default 30)"
    )
    parser.add_argument(
        "--max-restarts", type=int, metavar="N", help="start all ranks anew, N times, when one fails (default 0)"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank-K.out and DIR/rank-K.err")
    parser.add_argument("--options", type=Path, metavar="FILE", help="a TOML file of these options; docs/run.md")
    theirs = [option for options in _ELSEWHERE.values() for option in options]
    parser.add_argument(*theirs, dest="others", action=_OthersOption, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM...", help="what every rank runs")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Exit with the job's code; 127 where the command does not exist, 126 where it cannot be executed."""
    asked = _with_file(arguments)
    hosts = asked.hosts if asked.hostfile is None else parse_hostfile(asked.hostfile)
    if asked.ranks is None and hosts is None:
        arguments.refuse("how many ranks? say -n N, or --hosts H:N,... for several hosts")
    for name, reason in horovod_without_effect().items() if asked.horovod else ():
        print(f"multiring: {name} has no effect: {reason}", file=sys.stderr)
    options = JobOptions(
        log_dir=asked.log_dir,
        horovod=bool(asked.horovod),
        timeline=None if asked.timeline is None else file_path(asked.timeline),
        grace_s=JobOptions().grace_s if asked.grace is None else asked.grace,
        variables=variables_of(asked.env),
        stdin_rank=asked.stdin,
        max_restarts=asked.max_restarts or 0,
    )
    command = program_of(asked.program)
    return start(command, asked.ranks, hosts, options)


def start(command: list[str], ranks: int | None, hosts: str | None, options: JobOptions) -> int:
    """Run the job, and return its exit code."""
    options = _with_clear_timeline(options)
    try:
        if hosts is not None:
            return run_over_hosts(command, hosts, ranks, options)
        return run_local(command, ranks or 1, options)
    except CommandError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if options.timeline is not None:
            _make_do_with_parts(options.timeline, is_here=hosts is None)


def _with_clear_timeline(options: JobOptions) -> JobOptions:
    """Return the options without their timeline where another job records it; else remove what is left of an old one.

    Raises:
        ArgumentError: something is there that is no timeline.
    """
    if options.timeline is None:
        return options
    try:
        clear(options.timeline)
    except TakenError as error:
        print(f"multiring: no timeline of this job is recorded: {error}", file=sys.stderr)
        return replace(options, timeline=None)
    return options


def _with_file(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return `arguments` with what the file of options says where they say nothing."""
    given = {} if arguments.options is None else read_options(arguments.options)
    told = {name: value for name, value in vars(arguments).items() if value is not None}
    if told.keys() & {"hosts", "hostfile"}:  # either stands for whichever the file has
        given = {name: value for name, value in given.items() if name not in ("hosts", "hostfile")}
    asked = argparse.Namespace(**{**vars(arguments), **given, **told})
    asked.env = [*given.get("env", []), *told.get("env", [])]
    asked.program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    asked.program = asked.program or given.get("command", [])
    return asked


def program_of(words: list[str]) -> list[str]:
    """Return the command that `words` mean: a Python file that is no command of its own runs by this Python."""
    if not words or not words[0].endswith(".py") or not Path(words[0]).is_file():
        return words
    found = shutil.which(words[0])
    return words if found is not None and _names_interpreter(Path(found)) else [sys.executable, *words]


def _names_interpreter(path: Path) -> bool:
    """Return whether a file says what runs it, without which the system runs it by nothing."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True  # the system says what is wrong


def variables_of(words: list[str]) -> dict[str, str]:
    """Return the variables in `words`, NAME=VALUE or the NAME of one that is set here; the last of a name counts.

    Raises:
        ArgumentError: a word names none.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        here = inherited_environment()
        if not name or not (equals or name in here):
            raise ArgumentError(f"--env {word!r}: want NAME=VALUE, or the NAME of a variable that is set here")
        found[name] = value if equals else here[name]
    return found


def _make_do_with_parts(path: Path, *, is_here: bool) -> None:
    """Write the timeline of a job whose rank 0 did not come to it, from the parts that are here; or say there is none.

    `is_here`: all ranks were on this machine.
    """
    found = parts_of(path)
    left = [each for each in found if not is_held(each)]  # a held one is of another job, which records there now
    if not left:
        if is_here and not found and not path.exists():
            print(
                f"multiring: nobody wrote the timeline {path}: the program did not join the job (multiring.init()), or "
                "ended before it had",
                file=sys.stderr,
            )
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
    for each in (*left, *(unfinished_of(path) if left == found else ())):
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
