"""Run one job on several hosts without a scheduler: `multiring run` is started on each host, and node 0 coordinates."""

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring._launch.commands import check_can_run, refuse_places
from multiring._launch.control_tcp import ControlListener, connect
from multiring._launch.host_agent import Agent
from multiring._launch.host_job import HostTask
from multiring._launch.host_sessions import HostSession, HostSessions
from multiring._launch.hosts import hosts_job, run_job, task_of, what_to_send
from multiring._launch.job import JobOptions
from multiring._launch.local import refuse_unfit_settings
from multiring._launch.standard_streams import open_closed_streams
from multiring._runtime.bootstrap.addresses import TcpAddress, parse_address
from multiring._settings import Settings, inherited_environment
from multiring.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """The place of this host among the nodes of a job.

    - nodes: the number of nodes.
    - node: the number of this one, from 0.
    - meet: host:port, where node 0 listens.

    Raises:
        ArgumentError: a value is not possible.
    """

    nodes: int
    node: int
    meet: str

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 <= self.node < self.nodes:
            raise ArgumentError(
                f"--nodes {self.nodes} --node-rank {self.node}: want a number of nodes, and a node from 0 to one less"
            )
        if not self.address.host:
            raise ArgumentError(f"--meet {self.meet!r}: want HOST:PORT")

    @property
    def address(self) -> TcpAddress:
        """The parsed address."""
        place = parse_address(self.meet)
        if not isinstance(place, TcpAddress):
            raise ArgumentError(f"--meet {self.meet!r}: want HOST:PORT, the host of node 0 and a free port there")
        return place


def run_node(command: Sequence[str], ranks: int, place: NodePlace, options: JobOptions | None = None) -> int:
    """Run `command` as this node's ranks of a job, and return the job's exit code.

    All nodes wait until every node has come. Node 0 starts all ranks, decides about failures and restarts, and ends the
    job. Each node shows the output of its own ranks. With `options.max_ranks`, a node that was lost may come again.

    Args:
        command: the program and its arguments.
        ranks: the number of ranks of this node.
        place: this node's place.
        options: options of the job. Those of node 0 decide about restarts, lost ranks and the time to save.

    Raises:
        ArgumentError: no secret is set, or an option has an invalid value.
        CommandError: the command does not exist or cannot be executed.
        LaunchError: a node did not come, or has another secret or version.
        UnsupportedError: the system is not Linux.
        StateError: the caller is not the main thread.
    """
    options = options or JobOptions()
    open_closed_streams()
    refuse_places(options.variables, horovod=options.horovod, timeline=options.timeline is not None)
    if options.stdin_rank is not None:
        raise ArgumentError(f"--stdin {options.stdin_rank} with --nodes: no rank can read standard input")
    environment = inherited_environment() | dict(options.variables)
    check_can_run("multiring run", command, environment)
    settings = Settings.from_environment(environment, horovod=options.horovod)
    refuse_unfit_settings(options, environment)
    secret = _secret_of(settings)
    if place.node > 0:
        link = connect(place.meet, secret, place.node, settings.init_timeout_s)
        task = HostTask(command=tuple(command), environment=environment, options=options, secret=secret, relays=False)
        about = {"ranks": ranks, "host": os.uname().nodename, "nodes": place.nodes}
        return Agent(link, task, about).run()
    address = place.address
    listener = ControlListener(address, secret)
    sent = {
        **what_to_send(command, options),
        "environment": environment,
        "variables": dict(options.variables),
        "secret": secret.hex(),
    }
    absent = (
        "every node must run the same command with its own --node-rank, with the same secret, and must reach "
        f"{place.meet}"
    )
    job = task_of(sent, settings, settings.init_timeout_s, absent, secret)
    others = [HostSession(f"node {node}", node, ranks, shows_itself=True) for node in range(1, place.nodes)]
    sessions = HostSessions([HostSession(address.host, 0, ranks, HostSession.open_here), *others])
    try:
        return run_job(sessions, lambda current, number: hosts_job(sessions, job, current, number, listener), options)
    finally:
        listener.close()


def _secret_of(settings: Settings) -> bytes:
    """Return the secret that the user has given to all nodes.

    Raises:
        ArgumentError: there is none, or its file cannot be read or is empty.
    """
    if settings.secret is not None:
        secret = settings.secret.encode()
    elif settings.secret_file is not None:
        try:
            secret = Path(settings.secret_file).read_bytes().strip()
            mode = stat.S_IMODE(Path(settings.secret_file).stat().st_mode)
        except OSError as error:
            raise ArgumentError(f"MULTIRING_SECRET_FILE={settings.secret_file!r}: {error.strerror}") from None
        if mode & stat.S_IROTH:
            sys.stderr.write(
                f"multiring: every user of this host can read the secret in MULTIRING_SECRET_FILE="
                f"{settings.secret_file!r} (mode {mode:04o}), and with it join the job: `chmod 600` the file\n"
            )
    else:
        raise ArgumentError(
            "--nodes needs a secret that all nodes share: set MULTIRING_SECRET_FILE to a file that only you can read, "
            "the same on every node, or MULTIRING_SECRET"
        )
    if not secret:
        raise ArgumentError(
            "the secret of the nodes is empty: want a long random text, such as of `openssl rand -hex 32`"
        )
    return secret
