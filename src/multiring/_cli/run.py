"""multiring run: start a command as N ranks on this machine, on several by ssh, or on those of an allocation.

A Python file is started with this Python. Every output line is tagged with its rank. When a rank fails, its last lines
are shown, the others are stopped, and its exit code is returned (128 + n for signal n). After Ctrl-C or SIGTERM the
ranks have --grace seconds to save their work; a second signal kills them at once. The command ends every process of the
job, also on several hosts. With --launcher mpiexec, the mpiexec on PATH starts the ranks and does all this in its own
way. With --horovod, a program that imports horovod gets multiring (docs/horovod.md). With --timeline, one file shows
what all ranks did (docs/timeline.md). docs/run.md has all details.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from multiring._cli.number_option import DAY_S, MOST_RANKS, PAUSE, NumberOption, whole
from multiring._cli.run_file import read_options
from multiring._launch import (
    CommandError,
    DiscoveryOptions,
    HostsLauncher,
    JobOptions,
    NodePlace,
    SlurmAllocation,
    default_ranks,
    horovod_without_effect,
    listed_hosts,
    parse_hostfile,
    run_in_slurm,
    run_local,
    run_node,
    run_over_hosts,
    slurm_allocation,
    torchrun_nodes,
    visible_gpus,
)
from multiring._settings import environment_of, inherited_environment
from multiring.errors import ArgumentError

# Option of multiring run -> the options of other launchers with the same meaning.
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
    "--hosts H:N,...": ("-H", "--host"),
    "--nodes NODES": ("--nnodes", "--num-machines", "--num_machines"),
    "--node-rank K": ("--node_rank", "--machine-rank", "--machine_rank"),
    "--hostfile FILE": ("-hostfile", "--machinefile", "-machinefile", "-f"),
    "MULTIRING_RENDEZVOUS=HOST:PORT in its environment": ("--master-addr", "--master_addr", "--main_process_ip"),
    "--log-dir DIR": ("--output-filename", "--log_dir"),
    "-- python -m MODULE, behind the options": ("-m", "--module"),
}


class LiveWishes(NamedTuple):
    """What the user wants to see of a running job: the values of --record, --page and --page-token-file."""

    record: Path | None
    page: str | None
    token_file: Path | None


class _OthersOption(argparse.Action):
    """Rejects an option of another launcher with an error that names multiring's option."""

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        option = others[-1]
        ours = next(ours for ours, theirs in _ELSEWHERE.items() if option in theirs)
        parser.error(f"{option} is an option of other launchers; use instead: {ours}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "multiring run [-n N | --hosts H:N,... | --hostfile FILE] [OPTIONS] [--] PROGRAM [ARGUMENTS...]"
    default = "number of ranks; default: one for each GPU (several GPUs: verified on stand-ins only)"
    parser.add_argument("-n", dest="ranks", type=_count, metavar="N", help=default)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="H:N,...", help="hosts with their numbers of ranks, which ssh reaches")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts from lines like: a slots=4")
    parser.add_argument(
        "--launcher",
        choices=[each.value for each in HostsLauncher],
        metavar="NAME",
        help="what starts the ranks on other hosts: ssh (default), or the mpiexec on PATH",
    )
    parser.add_argument("--nodes", type=_count, metavar="NODES", help="number of hosts that run this command, each")
    parser.add_argument(
        "--node-rank", type=whole(0, MOST_RANKS), metavar="K", help="this host's number among them, from 0"
    )
    parser.add_argument("--meet", metavar="HOST:PORT", help="where node 0 listens for the other nodes")
    parser.add_argument(
        "--here", action="store_true", default=None, help="use this host only, also in an allocation of a scheduler"
    )
    parser.add_argument(
        "--horovod", action="store_true", default=None, help="let `import horovod` import multiring in the ranks"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write a timeline of all ranks for Perfetto; .gz compresses it"
    )
    parser.add_argument(
        "--env",
        action="append",
        metavar="NAME=VALUE",
        help="set a variable for the ranks; NAME alone passes this process's value on",
    )
    parser.add_argument(
        "--stdin", type=whole(0, MOST_RANKS), metavar="RANK", help="the rank that reads standard input, as pdb does"
    )
    parser.add_argument(
        "--grace", type=PAUSE, metavar="S", help="seconds for the ranks to end after Ctrl-C or SIGTERM (default 30)"
    )
    parser.add_argument(
        "--max-restarts", type=whole(0), metavar="N", help="start all ranks again after a failure, N times (default 0)"
    )
    parser.add_argument(
        "--min-ranks",
        type=_count,
        metavar="K",
        help="go on without lost ranks, as long as K are left (docs/elastic.md)",
    )
    parser.add_argument(
        "--max-ranks",
        type=_count,
        metavar="N",
        help="with --min-ranks: start newcomers in place of lost ranks, and until there are N ranks",
    )
    parser.add_argument(
        "--reset-limit", type=whole(0), metavar="N", help="with --max-ranks: replace N lost ranks at most (default 100)"
    )
    parser.add_argument(
        "--host-discovery",
        metavar="SCRIPT",
        help="with --max-ranks: use the hosts that SCRIPT prints, as lines host:slots, now and later",
    )
    parser.add_argument(
        "--survive-launcher",
        type=NumberOption(float, 1, DAY_S, unit="seconds"),
        metavar="S",
        help="if this process is killed, the ranks go on for S seconds, and the same command adopts them",
    )
    parser.add_argument(
        "--seal",
        action="store_true",
        default=None,
        help="encrypt what ranks send to other hosts over sockets, as MULTIRING_SEAL=1 (docs/failures.md)",
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank-K.out and DIR/rank-K.err")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append what becomes of the job to FILE, as JSON (docs/live.md)",
    )
    parser.add_argument(
        "--page", metavar="[HOST:]PORT", help="serve a page of the running job and its metrics; on this host by default"
    )
    parser.add_argument(
        "--page-token-file", type=Path, metavar="FILE", help="the token of the page, which other hosts need"
    )
    parser.add_argument("--options", type=Path, metavar="FILE", help="a TOML file of these options (docs/run.md)")
    theirs = [option for options in _ELSEWHERE.values() for option in options]
    parser.add_argument(*theirs, dest="others", action=_OthersOption, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM...", help="the program of every rank")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code.

    127: the command does not exist. 126: it cannot be executed.
    """
    asked = _with_file(arguments)
    if asked.survive_launcher is not None and arguments.started_by is not None:
        if asked.stdin is not None:
            arguments.refuse("--stdin needs the terminal of one launcher; leave out --survive-launcher")
        from multiring._cli.run_kept import run_surviving  # noqa: PLC0415 -- most jobs start faster without

        return run_surviving(arguments.started_by, asked.survive_launcher)
    return _run_asked(asked, arguments)


def _run_asked(asked: argparse.Namespace, arguments: argparse.Namespace) -> int:
    """Run the job of the options `asked`, which the file of options has completed."""
    hosts = asked.hosts if asked.hostfile is None else parse_hostfile(asked.hostfile)
    node = _node(asked, arguments)
    if asked.here and hosts is not None:
        arguments.refuse("--here uses this host only; leave out --hosts or --hostfile")
    for name, reason in horovod_without_effect().items() if asked.horovod else ():
        print(f"multiring: {name} has no effect: {reason}", file=sys.stderr)
    options = JobOptions(
        log_dir=asked.log_dir,
        horovod=bool(asked.horovod),
        timeline=None if asked.timeline is None else _path_of_timeline(asked.timeline),
        grace_s=JobOptions().grace_s if asked.grace is None else asked.grace,
        variables={**variables_of(asked.env), **(environment_of(seal=1) if asked.seal else {})},
        stdin_rank=asked.stdin,
        max_restarts=asked.max_restarts or 0,
        min_ranks=asked.min_ranks,
        max_ranks=asked.max_ranks,
        reset_limit=JobOptions().reset_limit if asked.reset_limit is None else asked.reset_limit,
        discovery=None if asked.host_discovery is None else DiscoveryOptions(script=asked.host_discovery),
    )
    command = program_of(asked.program)
    launcher = HostsLauncher.SSH if asked.launcher is None else HostsLauncher(asked.launcher)
    environment = inherited_environment()
    wishes = LiveWishes(asked.record, asked.page, asked.page_token_file)
    if options.discovery is not None and (node is not None or hosts is not None or asked.here):
        arguments.refuse("--host-discovery names the hosts; leave out --hosts, --hostfile, --nodes and --here")
    if node is None and hosts is None and not asked.here and options.discovery is None:
        allocation = slurm_allocation(environment)
        if allocation is not None and command:
            by_srun = partial(_start_in_slurm, command, asked.ranks, allocation)
            return _watched(wishes, command, by_srun, options)
        hosts = listed_hosts(environment)
        if hosts is not None:
            print(
                f"multiring: ranks on {hosts}, the hosts of this allocation; --here uses this one only", file=sys.stderr
            )
    ranks = asked.ranks
    if ranks is None and hosts is None and command and options.discovery is None:
        ranks, reason = default_ranks(visible_gpus(environment))
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        print(f"multiring: {many}, {reason}; -n N starts another number", file=sys.stderr)
    unfit = ""
    if node is not None and node.node > 0:
        unfit = f"node 0 has the job's record and page; leave the options out on node {node.node}"
    elif hosts is not None and launcher is HostsLauncher.MPIEXEC:
        unfit = "mpiexec starts the ranks, and multiring does not hear from them; want --launcher ssh"
    return _watched(
        wishes, command, lambda current: start(command, ranks, hosts, current, launcher, node), options, unfit
    )


def _watched(
    wishes: LiveWishes, command: list[str], job: Callable[[JobOptions], int], options: JobOptions, unfit: str = ""
) -> int:
    """Run a job with the record and the page that the user wants; `unfit` says why it cannot have them, or nothing."""
    if wishes == LiveWishes(None, None, None):
        return job(options)
    from multiring._cli.run_live import run_live  # noqa: PLC0415 -- most jobs start faster without

    if unfit:
        raise ArgumentError(f"--record and --page: {unfit}")
    return run_live(wishes, command, job, options)


def _node(asked: argparse.Namespace, arguments: argparse.Namespace) -> NodePlace | None:
    """Return this host's place among the nodes, or None if neither --nodes nor torchrun's variables give one."""
    words = {"--nodes": asked.nodes, "--node-rank": asked.node_rank, "--meet": asked.meet}
    missing = [name for name, value in words.items() if value is None]
    if len(missing) == len(words):
        return _node_of_torchrun(asked)
    if missing:
        arguments.refuse(f"{missing[0]} is missing: want --nodes NODES --node-rank K --meet HOST:PORT on every host")
    if asked.hosts is not None or asked.hostfile is not None or asked.here:
        arguments.refuse("--nodes goes with neither --hosts nor --hostfile nor --here")
    return NodePlace(nodes=asked.nodes, node=asked.node_rank, meet=asked.meet)


def _node_of_torchrun(asked: argparse.Namespace) -> NodePlace | None:
    """Return the place that torchrun's variables PET_* give this host, and set the number of ranks by them.

    Kubeflow Trainer sets these variables. Options that name the hosts override them.
    """
    if asked.hosts is not None or asked.hostfile is not None or asked.here:
        return None
    found = torchrun_nodes(inherited_environment())
    if found is None:
        return None
    asked.ranks = asked.ranks or found.ranks
    if found.nodes == 1:
        return None
    print(
        f"multiring: this is node {found.node_rank} of {found.nodes}, by torchrun's variables PET_*; --here uses this "
        "host only",
        file=sys.stderr,
    )
    return NodePlace(nodes=found.nodes, node=found.node_rank, meet=found.meet)


def _start_in_slurm(command: list[str], ranks: int | None, allocation: SlurmAllocation, options: JobOptions) -> int:
    """Run a job on all nodes of a Slurm allocation, and return its exit code."""
    counts = allocation.counts(ranks, options)
    places = ", ".join(map(str, counts))
    print(
        f"multiring: {sum(counts)} ranks on the {len(counts)} nodes of Slurm job {allocation.job} ({places}), by srun; "
        "--here uses this node only",
        file=sys.stderr,
    )
    return _run(lambda current: run_in_slurm(command, ranks, allocation, current), options, is_here=False)


def start(
    command: list[str],
    ranks: int | None,
    hosts: str | None,
    options: JobOptions,
    launcher: HostsLauncher = HostsLauncher.SSH,
    node: NodePlace | None = None,
) -> int:
    """Run a job on this machine, on `hosts` or as a node among several, and return its exit code."""

    def job(current: JobOptions) -> int:
        if node is not None:
            return run_node(command, ranks or 1, node, current)
        if hosts is not None or current.discovery is not None:
            return run_over_hosts(command, hosts, ranks, current, launcher)
        return run_local(command, ranks or 1, current)

    return _run(job, options, is_here=hosts is None and node is None and options.discovery is None)


def _path_of_timeline(path: Path) -> Path:
    """Return the absolute path of a timeline; see `multiring.trace.file_path`."""
    from multiring.trace import file_path  # noqa: PLC0415 -- it needs NumPy, and most jobs start faster without

    return file_path(path)


def _run(job: Callable[[JobOptions], int], options: JobOptions, *, is_here: bool) -> int:
    """Run a job, make its timeline complete, and return its exit code; `is_here`: all ranks are on this host."""
    if options.timeline is None:
        return _run_alone(job, options)
    from multiring._cli.run_timeline import make_do_with_parts, with_clear_timeline  # noqa: PLC0415 -- as above

    options = with_clear_timeline(options, options.timeline)
    try:
        return _run_alone(job, options)
    finally:
        if options.timeline is not None:
            make_do_with_parts(options.timeline, is_here=is_here)


def _run_alone(job: Callable[[JobOptions], int], options: JobOptions) -> int:
    try:
        return job(options)
    except CommandError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code


def _with_file(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return `arguments`, with missing options taken from the options file."""
    given = {} if arguments.options is None else read_options(arguments.options)
    told = {name: value for name, value in vars(arguments).items() if value is not None}
    if told.keys() & {"hosts", "hostfile"}:  # either option overrides both options of the file
        given = {name: value for name, value in given.items() if name not in ("hosts", "hostfile")}
    asked = argparse.Namespace(**{**vars(arguments), **given, **told})
    asked.env = [*given.get("env", []), *told.get("env", [])]
    asked.program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    asked.program = asked.program or given.get("command", [])
    return asked


def program_of(words: list[str]) -> list[str]:
    """Return the command to run for the program's words.

    If a .py file is not executable, the command runs it with this Python.
    """
    if not words or not words[0].endswith(".py") or not Path(words[0]).is_file():
        return words
    found = shutil.which(words[0])
    return words if found is not None and _names_interpreter(Path(found)) else [sys.executable, *words]


def _names_interpreter(path: Path) -> bool:
    """Return whether a file begins with `#!`, so that the system can execute it."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True  # an attempt to execute the file will report the error


def variables_of(words: list[str]) -> dict[str, str]:
    """Return the variables in `words`, by name. The last word for a name counts.

    A word is NAME=VALUE, or the NAME of a variable of this process's environment.

    Raises:
        ArgumentError: a word has no name, or names a variable that is not set.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        here = inherited_environment()
        if not name:  # the value may be a secret
            raise ArgumentError("--env: there is no name before the `=`; want NAME=VALUE, or the NAME of a variable")
        if not (equals or name in here):
            raise ArgumentError(f"--env {word!r}: want NAME=VALUE, or the NAME of a variable that is set here")
        found[name] = value if equals else here[name]
    return found


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text[:60]!r}: want an integer >= 1, at most {MOST_RANKS}")
    return count
