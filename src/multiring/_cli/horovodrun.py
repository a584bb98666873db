"""multiring horovodrun: run a program with Horovod's command line; the program gets multiring as its Horovod.

The command knows every option of Horovod 0.28.1. If multiring has the feature, the option does the same. If an option
has no effect, a message gives the reason. If multiring cannot do what an option asks for, an error names an
alternative. docs/horovod.md has the table.
"""

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiring._cli.horovodrun_options import SPELT, SWITCHES, VALUES, option_of, read_configuration
from multiring._cli.number_option import COUNT, DAY_S, RANKS, number, require_numbers, whole
from multiring._cli.run import program_of, start
from multiring._launch import (
    DiscoveryOptions,
    HostsLauncher,
    JobOptions,
    horovod_without_effect,
    hosts_beyond_this,
    parse_hostfile,
    parse_hosts,
)
from multiring._launch.horovod import interface_variables, ssh_words
from multiring._settings import environment_of, inherited_environment
from multiring._version import VERSION
from multiring.errors import ArgumentError, UnsupportedError
from multiring.horovod.builds import ADAPTERS, extension_available
from multiring.horovod.versions import HOROVOD_VERSION
from multiring.trace import file_path

_FRAMEWORKS = MappingProxyType({"tensorflow": "TensorFlow", "torch": "PyTorch", "mxnet": "MXNet"})
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_MOST_RANKS = 4096  # with a script that names the hosts, and without --max-np
# The options of elastic jobs that say nothing by themselves.
_ELASTIC = MappingProxyType(
    {
        "slots": "--slots-per-host",
        "reset_limit": "--reset-limit",
        "cooldown_range": "--blacklist-cooldown-range",
        "elastic_timeout": "--elastic-timeout",
    }
)
# Attribute -> (option, the reason why it has no effect).
_NO_EFFECT = MappingProxyType(
    {
        "tcp_flag": ("--tcp", "bytes go over sockets; with MULTIRING_ENGINE=mpi, over the site's MPI"),
        "binding_args": ("--binding-args", "the launcher gives each rank its cores"),
        "prefix_output_with_timestamp": ("--prefix-output-with-timestamp", "lines are tagged with their rank only"),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "multiring horovodrun -np N [OPTIONS] PROGRAM [ARGUMENTS...]"
    parser.add_argument("-v", "--version", action="version", version=HOROVOD_VERSION)
    parser.add_argument("-np", "--num-proc", type=RANKS, metavar="N", help="number of ranks")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show the available parts, and exit")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="H:N,...", help="hosts with their numbers of places, filled in order")
    where.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="hosts from lines like: a slots=4")
    carrier = parser.add_mutually_exclusive_group()
    carrier.add_argument("--gloo", action="store_true", help="the ranks meet without MPI (the default)")
    carrier.add_argument("--mpi", action="store_true", help="the mpiexec on PATH starts the ranks, on one host too")
    carrier.add_argument("--jsrun", action="store_true", help="refused: see docs/horovod.md")
    parser.add_argument("--config-file", type=Path, metavar="FILE", help="a YAML file of options in Horovod's format")
    parser.add_argument("--output-filename", type=Path, metavar="DIR", help="also write DIR/rank.K/stdout and stderr")
    parser.add_argument("--timeline-filename", type=Path, metavar="FILE", help="write a timeline for Perfetto")
    parser.add_argument(
        "--start-timeout", type=whole(1, DAY_S), metavar="S", help="seconds that init waits for all ranks"
    )
    parser.add_argument(
        "--network-interfaces",
        "--network-interface",
        dest="nics",
        metavar="A,B",
        help="interfaces on which ranks listen; several become rails",
    )
    parser.add_argument("-p", "--ssh-port", type=whole(1, 65_535), metavar="PORT", help="port for ssh")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    parser.add_argument("--mpi-args", metavar="WORDS", help="more arguments for mpiexec")
    _add_known(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM...", help="the program of every rank")
    parser.set_defaults(refuse=parser.error, require_numbers=partial(require_numbers, parser))


_KINDS: Mapping[Any, Any] = MappingProxyType({int: whole(0), float: number(0, 1e9), str: str})
_BOUNDS = MappingProxyType(
    {
        "num_nccl_streams": COUNT,
        "autotune_gaussian_process_noise": number(0, 1),
        "gloo_timeout_seconds": COUNT,  # the ranks would refuse 0 of this variable and of the next one
        "stall_check_warning_time_seconds": COUNT,
    }
)


def _add_known(parser: argparse.ArgumentParser) -> None:
    """Declare the options that set a variable or have no effect."""
    known = parser.add_argument_group("options that multiring reads, or reports to have no effect")
    for name, (variable, kind, _) in VALUES.items():
        choices = _LEVELS if name == "log_level" else None
        known.add_argument(option_of(name), type=_BOUNDS.get(name, _KINDS[kind]), choices=choices, help=variable)
    for name, (variable, _) in SWITCHES.items():
        on, off = SPELT.get(name, ((option_of(name),), (option_of(f"no_{name}"),)))
        known.add_argument(*on, dest=name, action="store_true", default=None, help=variable)
        known.add_argument(*off, dest=name, action="store_false", default=None, help=argparse.SUPPRESS)
    known.add_argument("--disable-cache", action="store_true", help="nothing is cached")
    known.add_argument("--verbose", action="store_true", help="no effect: errors are printed in any case")
    known.add_argument("--tcp", dest="tcp_flag", action="store_true", default=None, help=_NO_EFFECT["tcp_flag"][1])
    known.add_argument("--binding-args", help=_NO_EFFECT["binding_args"][1])
    known.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        default=None,
        help=_NO_EFFECT["prefix_output_with_timestamp"][1],
    )
    changing = parser.add_argument_group("options of elastic jobs, whose ranks come and go (docs/elastic.md)")
    changing.add_argument(
        "--min-np",
        "--min-num-proc",
        type=RANKS,
        dest="min_num_proc",
        metavar="K",
        help="go on as long as K ranks are left",
    )
    changing.add_argument(
        "--max-np", "--max-num-proc", type=RANKS, dest="max_num_proc", metavar="N", help="use places for up to N ranks"
    )
    changing.add_argument("--host-discovery-script", metavar="SCRIPT", help="use the hosts that SCRIPT prints")
    changing.add_argument(
        "--slots-per-host", type=RANKS, dest="slots", help="places of a host that SCRIPT prints without"
    )
    changing.add_argument("--elastic-timeout", type=whole(0), metavar="S", help="how long to wait for -np places (600)")
    changing.add_argument("--reset-limit", type=whole(0), metavar="N", help="replace N lost ranks at most (100)")
    changing.add_argument(
        "--blacklist-cooldown-range",
        type=whole(0),
        nargs=2,
        dest="cooldown_range",
        metavar="S",
        help="the first and the longest pause of a host that fails twice (10 300)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the job and return its exit code.

    127: the command does not exist. 126: it cannot be executed.
    """
    if arguments.check_build:
        print(_what_is_there())
        return 0
    if arguments.config_file is not None:
        read_configuration(arguments, arguments.config_file)
        arguments.require_numbers(arguments)
    if arguments.num_proc is None:
        arguments.refuse("how many ranks? say -np N")
    if arguments.jsrun:
        raise UnsupportedError(
            "--jsrun: let jsrun start `python -m multiring.horovod script.py` itself, with one rank per task"
        )
    changing = _changing(arguments)
    variables = variables_of(arguments)
    said = horovod_without_effect(variables)
    said |= {option: why for name, (option, why) in _NO_EFFECT.items() if getattr(arguments, name) is not None}
    for name, why in said.items():
        print(f"multiring: {name} has no effect: {why}", file=sys.stderr)
    options = JobOptions(
        log_dir=arguments.output_filename,
        logs=_logs,
        horovod=True,
        timeline=None if arguments.timeline_filename is None else file_path(arguments.timeline_filename),
        variables=variables,
        mpiexec_words=_words_of(arguments.mpi_args or ""),
        ssh_words=ssh_words(arguments.ssh_port, arguments.ssh_identity_file),
        **changing,
    )
    if arguments.host_discovery_script is not None:
        return start(program_of(arguments.program), None, None, options)
    ranks = options.max_ranks or arguments.num_proc
    launcher = HostsLauncher.MPIEXEC if arguments.mpi or arguments.mpi_args else HostsLauncher.SSH
    return start(program_of(arguments.program), ranks, _hosts(arguments, ranks), options, launcher)


def variables_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables that pass the options on to the ranks and to mpiexec."""
    told: dict[str, str] = {}
    for name, (variable, _, text_of) in VALUES.items():
        if (value := getattr(arguments, name)) is not None:
            told[variable] = text_of(value)
    for name, (variable, text_of) in SWITCHES.items():
        if (value := getattr(arguments, name)) is not None:
            told[variable] = text_of(value)
    if arguments.start_timeout is not None:
        told |= environment_of(init_timeout_s=arguments.start_timeout)
    told |= interface_variables(arguments.nics)
    ssh = ssh_words(arguments.ssh_port, arguments.ssh_identity_file)
    if ssh and (arguments.mpi or arguments.mpi_args):  # the variables are for Hydra, Open MPI 5 and Open MPI 4
        named = ("HYDRA_LAUNCHER_EXTRA_ARGS", "PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args")
        told |= dict.fromkeys(named, shlex.join(ssh))
    return told


def _words_of(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentError(f"--mpi-args {text!r}: {error}; want words quoted as for a shell") from None


def _spelt_hosts(arguments: argparse.Namespace) -> str:
    hosts: str | None = arguments.hosts if arguments.hostfile is None else parse_hostfile(arguments.hostfile)
    return f"localhost:{arguments.num_proc}" if hosts is None else hosts


def _hosts(arguments: argparse.Namespace, ranks: int) -> str | None:
    """Return the hosts, or None if this process starts the ranks itself."""
    spelt = _spelt_hosts(arguments)
    beyond = hosts_beyond_this(spelt, ranks)
    return spelt if arguments.mpi else beyond


def _changing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a job whose ranks come and go; nothing for a job with a fixed number of ranks.

    Raises:
        ArgumentError: a bound does not fit -np, or an option has no meaning in this job.
    """
    ranks, least, most = arguments.num_proc, arguments.min_num_proc, arguments.max_num_proc
    has_script = arguments.host_discovery_script is not None
    if least is not None and not 1 <= least <= ranks:
        raise ArgumentError(f"--min-np {least}, -np {ranks}: want 1 to {ranks}")
    if most is not None and most < ranks:
        raise ArgumentError(f"--max-np {most}, -np {ranks}: want at least {ranks}")
    # As in Horovod, --min-np alone makes a job elastic: it uses all places of the hosts.
    if not has_script and (least, most) in ((None, None), (None, ranks), (ranks, ranks)):
        _refuse(arguments, _ELASTIC, "want --min-np K or --host-discovery-script, too")
        return {}
    changing: dict[str, Any] = {"min_ranks": least or ranks}
    if arguments.reset_limit is not None:
        changing["reset_limit"] = arguments.reset_limit
    if arguments.cooldown_range is not None:
        changing["cooldown_s"] = tuple(map(float, arguments.cooldown_range))
    if has_script:
        return {**changing, "max_ranks": most or max(ranks, _MOST_RANKS), "discovery": _discovery(arguments)}
    _refuse(arguments, ("slots", "elastic_timeout"), "want --host-discovery-script, too")
    places = sum(count for _, count in parse_hosts(_spelt_hosts(arguments)))
    return {**changing, "max_ranks": max(ranks, min(most or places, places))}


def _refuse(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ArgumentError(f"{_ELASTIC[name]}: {why}")


def _discovery(arguments: argparse.Namespace) -> DiscoveryOptions:
    if arguments.hosts is not None or arguments.hostfile is not None:
        raise ArgumentError("--host-discovery-script names the hosts; leave out -H and -hostfile")
    timeout_s = arguments.elastic_timeout
    return DiscoveryOptions(
        script=arguments.host_discovery_script,
        slots=1 if arguments.slots is None else arguments.slots,
        timeout_s=float(_number_in("HOROVOD_ELASTIC_TIMEOUT", 600) if timeout_s is None else timeout_s),
        places=arguments.num_proc,
    )


def _number_in(variable: str, default: int) -> int:
    """Return the value of a variable of Horovod's.

    Raises:
        ArgumentError: it is no number.
    """
    text = inherited_environment().get(variable)
    if text is None:
        return default
    if not text.isdecimal():
        raise ArgumentError(f"{variable}={text!r}: want a number of seconds")
    return int(text)


def _logs(rank: int, ranks: int) -> tuple[str, str]:
    """Return a rank's log files with Horovod's names. The rank is zero-padded, so the folders sort by rank."""
    folder = f"rank.{rank:0{len(str(ranks - 1))}d}"
    return f"{folder}/stdout", f"{folder}/stderr"


def _what_is_there() -> str:
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    parts = {
        "Frameworks": {title: name in ADAPTERS and extension_available(name) for name, title in _FRAMEWORKS.items()},
        "Controllers": {"MPI": False, "Gloo": False, "multiring, which needs neither": True},
        "Tensor Operations": {
            "NCCL": False,
            "DDL": False,
            "CCL": False,
            "MPI (MULTIRING_ENGINE=mpi)": has_mpi,
            "Gloo": False,
            "multiring": True,
        },
    }
    told = [f"Horovod v{HOROVOD_VERSION}, by multiring {VERSION}:"]
    for part, names in parts.items():
        told += ["", f"Available {part}:"]
        told += [f"    [{'X' if is_there else ' '}] {name}" for name, is_there in names.items()]
    return "\n".join(told)
