"""Run a command as ranks on several hosts, by the agents of the hosts."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from multiring._launch.commands import check_can_run, refuse_places
from multiring._launch.control_tcp import ControlListener
from multiring._launch.discovering_job import DiscoveringHostsJob
from multiring._launch.elastic_hosts import GrowingHostsJob, HostSource, ShrinkingHostsJob
from multiring._launch.host_discovery import HostDiscovery
from multiring._launch.host_sessions import HostSession, HostSessions, is_here, ssh_words
from multiring._launch.hosts_job import HostsJob
from multiring._launch.hosts_loop import HostsTask
from multiring._launch.job import JobOptions
from multiring._launch.local import job_name, refuse_min_ranks, refuse_too_few_places, run_with_restarts
from multiring._launch.mpiexec import first_places, parse_hosts
from multiring._launch.over_mpiexec import run_by_mpiexec
from multiring._launch.pickled_call import CallFolder
from multiring._launch.standard_streams import open_closed_streams
from multiring._runtime.bootstrap.open_files import make_room_for_files
from multiring._settings import HOROVOD_PLACE, TORCH_PLACE, Settings, environment_of, inherited_environment
from multiring.errors import ArgumentError, MultiringError

_ANSWER_S = 60.0  # how long hosts may take to answer
_FILES_A_HOST, _OTHER_FILES = 8, 64  # pipes of a session, and those of a session that begins while another ends
# Variables that belong to a host, to a session there, or to another launcher. Each host has its own.
_OF_A_HOST = frozenset(
    {
        *("_", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "HOME", "HOST", "HOSTNAME", "KRB5CCNAME", "LOGNAME", "MAIL"),
        *("OLDPWD", "PWD", "SHELL", "SHLVL", "STY", "TEMP", "TERM", "TMP", "TMPDIR", "TMUX", "USER"),
        *("WAYLAND_DISPLAY", "WINDOW", "XAUTHORITY"),
    }
)
_OF_A_HOST_BEGIN = ("SSH_", "XDG_", "SLURM_", "PBS_", "LSB_", "PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "MPI_LOCAL")


class HostsLauncher(Enum):
    """What starts the ranks on several hosts. The value is its spelling."""

    SSH = "ssh"
    MPIEXEC = "mpiexec"


def run_over_hosts(
    command: Sequence[str],
    hosts: str | None,
    ranks: int | None = None,
    options: JobOptions | None = None,
    launcher: HostsLauncher = HostsLauncher.SSH,
    call: CallFolder | None = None,
) -> int:
    """Run `command` as ranks on hosts like `a:4,b:4` and return the job's exit code.

    Ranks run in this process's folder, with this process's environment and the options' variables.

    - ssh: an agent on each host starts the host's ranks. The hosts need OpenSSH and this Python under the same path.
      The exit code is that of `run_local`.
    - mpiexec: see `run_by_mpiexec`.

    Args:
        command: the program and its arguments.
        hosts: host names with numbers of ranks. None: a script names them (`options.discovery`).
        ranks: the number of ranks, default: all places of `hosts`. A smaller number fills the first places.
        options: options of the job.
        launcher: what starts the ranks.
        call: a call to send to the ranks, whose outcomes are written into its folder. `command` then begins
            `multiring._launch.function_rank`. Only with ssh.

    Raises:
        ArgumentError: `command` is empty, `hosts` is malformed or has fewer places than `ranks`, `stdin_rank` is not a
            rank, or a MULTIRING variable has an invalid value.
        CommandError: the command, ssh or mpiexec does not exist or cannot be executed.
        LaunchError: a host cannot be used; the text names it. Or `log_dir` cannot be written.
        UnsupportedError: the system is not Linux, or mpiexec is of an unknown kind.
        StateError: the caller is not the main thread.
    """
    options = options or JobOptions()
    if launcher is HostsLauncher.MPIEXEC:
        options.refuse_min_ranks("with --launcher mpiexec")
        if hosts is None:
            raise ArgumentError("--host-discovery with --launcher mpiexec: want --launcher ssh")
        return run_by_mpiexec(command, hosts, ranks, options)
    open_closed_streams()
    refuse_places(options.variables, horovod=options.horovod, timeline=options.timeline is not None)
    discovery = None if options.discovery is None else HostDiscovery(options.discovery, _say)
    if hosts is not None and discovery is None:
        known = parse_hosts(hosts)
    elif hosts is None and discovery is not None and options.discovery is not None:
        known = discovery.first(options.discovery.places or ranks or options.min_ranks or 1)
    else:
        raise ArgumentError("--hosts and --host-discovery: want one of them")
    if ranks is None and options.max_ranks is not None:
        ranks = min(options.max_ranks, sum(count for _, count in known))
    places = first_places(known, ranks)
    size = sum(count for _, count in places)
    if options.stdin_rank is not None and not 0 <= options.stdin_rank < size:
        raise ArgumentError(f"rank {options.stdin_rank} cannot read standard input: want a rank from 0 to {size - 1}")
    environment = inherited_environment() | dict(options.variables)
    # The command itself is checked on each host.
    check_can_run("multiring run", [sys.executable] if command else [], environment)
    settings = Settings.from_environment(environment, horovod=options.horovod)
    refuse_min_ranks(options, size, environment)
    if discovery is None:
        refuse_too_few_places(options, known)
    secret = settings.secret.encode() if settings.secret is not None else secrets.token_bytes(32)
    sent = {
        **what_to_send(command, options),
        # What the user has set for the ranks is theirs, even if the variable belongs to a host.
        "environment": _environment_to_send(environment) | dict(options.variables),
        "variables": dict(options.variables),
        "secret": secret.hex(),
    }
    patience_s = min(_ANSWER_S, settings.init_timeout_s)
    task = replace(task_of(sent, settings, patience_s, "try `ssh HOST true`", secret), call=call)

    def by_ssh(session: HostSession) -> None:
        session.open_by(ssh_words(session.name, options.ssh_words, environment))

    def session_of(place: tuple[str, int], index: int, ranks: int = 0) -> HostSession:
        name, slots = place
        opener = HostSession.open_here if is_here(name) else by_ssh
        return HostSession(name, index, ranks, opener, slots=slots)

    all_slots = dict(known)
    sessions = HostSessions(
        [
            session_of((name, count if options.max_ranks is None else all_slots[name]), index, count)
            for index, (name, count) in enumerate(places)
        ]
    )
    source = HostSource(session_of, known, discovery)
    return run_job(sessions, lambda current, number: hosts_job(sessions, task, current, number, source=source), options)


def hosts_job(
    sessions: HostSessions,
    task: HostsTask,
    options: JobOptions,
    number: int,
    listener: ControlListener | None = None,
    source: HostSource | None = None,
) -> HostsJob:
    """Return a new job, not yet started, of the kind that `options` ask for; the arguments are those of the kinds."""
    if options.min_ranks is None:
        return HostsJob(sessions, task, options, number, listener)
    if options.max_ranks is None:
        return ShrinkingHostsJob(sessions, task, options, number, listener)
    kind = GrowingHostsJob if options.discovery is None else DiscoveringHostsJob
    return kind(sessions, task, options, number, listener, source)


def _say(text: str) -> None:
    os.write(2, f"multiring: {text}\n".encode())


def hosts_beyond_this(hosts: str, ranks: int) -> str | None:
    """Return `hosts`, or None if its first `ranks` places are all on this host.

    Raises:
        ArgumentError: `hosts` is malformed, or has fewer than `ranks` places.
    """
    places = first_places(parse_hosts(hosts), ranks)
    return None if all(is_here(name) for name, _ in places) else hosts


def what_to_send(command: Sequence[str], options: JobOptions) -> dict[str, Any]:
    """Return the part of the plan that is the same for all launchers."""
    return {
        "python": python_version(),
        "command": list(command),
        "folder": os.getcwd(),  # noqa: PTH109 -- unresolved: other hosts may know the folder by this name only
        "horovod": options.horovod,
        "timeline": None if options.timeline is None else str(options.timeline),
    }


def task_of(sent: Mapping[str, Any], settings: Settings, patience_s: float, absent: str, secret: bytes) -> HostsTask:
    """Return the task of a job with the user's `settings`; the other arguments are those of HostsTask."""
    return HostsTask(
        sent=sent,
        rendezvous=settings.rendezvous,
        interface=settings.interface,
        ports=settings.ports,
        job=job_name(settings.job, f"hosts-{secrets.token_hex(8)}"),
        patience_s=patience_s,
        absent=absent,
        secret=secret,
        wire_timeout_s=settings.wire_timeout_s,
    )


def run_job(sessions: HostSessions, make: Callable[[JobOptions, int], HostsJob], options: JobOptions) -> int:
    """Run the job that `make` returns, with the restarts that `options` allow; end the agents and return the exit code.

    `make` takes the options and the number of a start, from 0.
    """
    number = -1

    def made(current: JobOptions) -> HostsJob:
        nonlocal number
        number += 1
        return make(current, number)

    def say_elsewhere(text: str) -> None:
        for session in sessions.all:
            if session.shows_itself:
                session.send(say=text)

    def say(text: str) -> None:
        _say(text)
        say_elsewhere(text)

    make_room_for_files(_FILES_A_HOST * len(sessions.all) + _OTHER_FILES)
    code = 1
    try:
        code = run_with_restarts(made, options, say)
    except MultiringError as error:
        say_elsewhere(str(error))
        raise
    finally:
        sessions.close(code)
    return code


def python_version() -> str:
    """Return this Python's version, which all hosts must have."""
    return ".".join(map(str, sys.version_info[:3]))


def _environment_to_send(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other hosts get."""
    outer = {
        *HOROVOD_PLACE.values(),
        *TORCH_PLACE.values(),
        *environment_of(rank=0, size=1, local_rank=0, local_size=1, secret="", secret_file="", job=""),
        *environment_of(rendezvous="", rank_process="", launched_in="", reports=""),
    }
    return {
        name: text
        for name, text in environment.items()
        if name not in _OF_A_HOST and not name.startswith(_OF_A_HOST_BEGIN) and name not in outer
    }
