"""Find the hosts that a scheduler has allocated to this process, and run a job on all of them."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring._launch.commands import check_can_run, refuse_places
from multiring._launch.control_tcp import ControlListener
from multiring._launch.host_sessions import AGENT, HostSession, HostSessions, open_step
from multiring._launch.hosts import hosts_job, run_job, task_of, what_to_send
from multiring._launch.job import JobOptions
from multiring._launch.local import refuse_min_ranks, refuse_too_few_places
from multiring._launch.own_modules import module_command
from multiring._launch.rank_starts import free_port
from multiring._launch.standard_streams import open_closed_streams
from multiring._runtime.bootstrap.addresses import TcpAddress, own_address
from multiring._settings import TORCH_PLACE, Settings, inherited_environment
from multiring.errors import ArgumentError, LaunchError

# Slurm's batch script and interactive shell are steps with reserved numbers from this one on (slurm.h).
_FIRST_RESERVED_STEP = 0xFFFFFFFA
_REACH_S = 60.0  # how long an agent tries to reach the launcher
# What a step would take from the allocation in place of the options given to it.
_OF_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK")
_OF_TASKS_TOO = ("SLURM_DISTRIBUTION", "SLURM_CPU_BIND", "SLURM_MPI_TYPE", "SLURM_EXACT", "SLURM_EXCLUSIVE")


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """The allocation of a Slurm job: its number, and the number of ranks that it has on each node."""

    job: str
    ranks: tuple[int, ...]

    def counts(self, ranks: int | None, options: JobOptions) -> list[int]:
        """Return how many of `ranks` ranks each node has; None: as many as the allocation says and `options` allow.

        Raises:
            ArgumentError: there are fewer ranks than nodes.
        """
        if ranks is None and options.max_ranks is not None and options.max_ranks < sum(self.ranks):
            ranks = options.max_ranks
        return list(self.ranks) if ranks is None else spread(ranks, len(self.ranks))


def slurm_allocation(environment: Mapping[str, str]) -> SlurmAllocation | None:
    """Return the allocation in whose batch script or shell a process with `environment` runs.

    The result is None outside of an allocation, and within a step of srun.

    Raises:
        ArgumentError: the job is heterogeneous, or Slurm's variables contradict each other.
    """
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "")
    if not job or (step.isdecimal() and int(step) < _FIRST_RESERVED_STEP):
        return None
    parts = environment.get("SLURM_HET_SIZE", "")
    if parts.isdecimal() and int(parts) > 1:
        raise ArgumentError(
            f"Slurm job {job} is heterogeneous and has {parts} components, each with nodes of its own. multiring run "
            f"uses one allocation: start the ranks with `srun --het-group=0-{int(parts) - 1} python train.py`, or use "
            "this node only with --here"
        )
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES", "")
    if not nodes.isdecimal():
        return None
    told = environment.get("SLURM_TASKS_PER_NODE", "")
    ranks: list[int] = []
    for part in told.split(",") if told else []:
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ArgumentError(f"SLURM_TASKS_PER_NODE={told!r}: want numbers like 2(x3),1")
        ranks += [int(found[1])] * int(found[2] or 1)
    if ranks and len(ranks) != int(nodes):
        raise ArgumentError(f"SLURM_TASKS_PER_NODE={told!r} is for {len(ranks)} nodes, but the allocation has {nodes}")
    return SlurmAllocation(job, tuple(ranks) or (1,) * int(nodes))


def spread(ranks: int, hosts: int) -> list[int]:
    """Return the numbers of ranks on `hosts` hosts, as even as possible; earlier hosts have one more.

    Raises:
        ArgumentError: there are fewer ranks than hosts.
    """
    if ranks < hosts:
        raise ArgumentError(
            f"-n {ranks}: the allocation has {hosts} nodes, which need a rank each; want -n {hosts} or more, or --here "
            "for this node only"
        )
    return [ranks // hosts + (index < ranks % hosts) for index in range(hosts)]


def listed_hosts(environment: Mapping[str, str]) -> str | None:
    """Return the hosts of a PBS or LSF job, in the form a:4,b:4, or None outside of such a job.

    Source: PBS_NODEFILE names a file with a line for each place; LSB_MCPU_HOSTS is "a 4 b 4", and LSB_DJOB_HOSTFILE
    names a file with a line for each place.

    Raises:
        ArgumentError: the file cannot be read, or the variable has another form.
    """
    words: list[str] = []
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if name in environment and not words:
            try:
                words = Path(environment[name]).read_text(encoding="utf-8").split()
            except OSError as error:
                raise ArgumentError(f"{name}={environment[name]!r}: {error.strerror}") from None
    told = environment.get("LSB_MCPU_HOSTS", "").split()
    if not words and told:
        if len(told) % 2 or not all(count.isdecimal() for count in told[1::2]):
            raise ArgumentError(f"LSB_MCPU_HOSTS={' '.join(told)!r}: want names and numbers, like a 4 b 4")
        words = [name for name, count in zip(told[::2], told[1::2], strict=True) for _ in range(int(count))]
    counts = {name: words.count(name) for name in dict.fromkeys(words)}
    return ",".join(f"{name}:{count}" for name, count in counts.items()) or None


def run_in_slurm(
    command: Sequence[str], ranks: int | None, allocation: SlurmAllocation, options: JobOptions | None = None
) -> int:
    """Run `command` as ranks on all nodes of a Slurm allocation and return the job's exit code.

    One step of srun starts an agent on each node. The agents connect to this process over TCP.

    Args:
        command: the program and its arguments.
        ranks: the number of ranks, spread evenly over the nodes. Default: as many on each node as the allocation says.
        allocation: the allocation.
        options: options of the job.

    Raises:
        ArgumentError: `command` is empty, there are fewer ranks than nodes or fewer places than `max_ranks`, or a
            variable has an invalid value.
        CommandError: srun or the command does not exist, or cannot be executed.
        LaunchError: the step cannot be started, or a node does not answer.
        UnsupportedError: the system is not Linux.
        StateError: the caller is not the main thread.
    """
    options = options or JobOptions()
    open_closed_streams()
    refuse_places(options.variables, horovod=options.horovod, timeline=options.timeline is not None)
    counts = allocation.counts(ranks, options)
    if options.stdin_rank is not None and not 0 <= options.stdin_rank < sum(counts):
        raise ArgumentError(f"rank {options.stdin_rank} cannot read standard input: want a rank below {sum(counts)}")
    environment = inherited_environment() | dict(options.variables)
    check_can_run("multiring run", ["srun"] if command else [], environment)
    settings = Settings.from_environment(environment, horovod=options.horovod)
    refuse_min_ranks(options, sum(counts), environment)
    # More ranks than the allocation has tasks are the user's wish: each node then has as many places.
    places = [max(pair) for pair in zip(counts, allocation.ranks, strict=True)]
    refuse_too_few_places(options, [(f"node {index}", count) for index, count in enumerate(places)])
    secret = settings.secret.encode() if settings.secret is not None else secrets.token_bytes(32)
    listener, address = _listener(settings, secret)
    patience_s = settings.init_timeout_s  # srun may start the agents late, because a step may wait for another to end
    told: dict[str, object] = {"launcher": address, "secret": secret.hex(), "node_variable": "SLURM_NODEID"}
    told["patience_s"] = min(_REACH_S, patience_s)
    nodes = str(len(counts))
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"]
    words += ["--mpi=none", "--input=all", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL"]
    words += ["--no-kill"] if options.min_ranks is not None else []  # the step outlives a lost node
    words += ["--job-name=multiring", *module_command(AGENT, "connect")]
    own = {name: text for name, text in environment.items() if name not in (*_OF_TASKS, *_OF_TASKS_TOO)}

    sessions = HostSessions(
        [
            HostSession(f"node {index}", index, count, slots=0 if options.max_ranks is None else places[index])
            for index, count in enumerate(counts)
        ],
        lambda: open_step(words, own, json.dumps(told).encode() + b"\n"),
    )
    # The environment goes the way of srun, because the connections over TCP can be read on the way.
    chosen = {name: text for name, text in options.variables.items() if name in TORCH_PLACE.values()}
    sent = {**what_to_send(command, options), "environment": {}, "variables": chosen, "secret": None}
    absent = (
        f"the agents must reach this process at {address}; MULTIRING_INTERFACE and MULTIRING_PORTS choose the address"
    )
    task = task_of(sent, settings, patience_s, absent, secret)
    try:
        return run_job(sessions, lambda current, number: hosts_job(sessions, task, current, number, listener), options)
    finally:
        listener.close()


def _listener(settings: Settings, secret: bytes) -> tuple[ControlListener, str]:
    """Return where the agents come to, and its address."""
    host = own_address(settings.interface)
    for _ in range(8):  # another process may take the port before this one listens
        try:
            port = free_port(host, settings.ports)
        except OSError as error:
            raise LaunchError(f"no port of MULTIRING_PORTS is free at {host}: {error.strerror}") from None
        with contextlib.suppress(LaunchError):
            return ControlListener(TcpAddress(host, port), secret), str(TcpAddress(host, port))
    raise LaunchError(f"no port is free at {host}")


def default_ranks(gpus: int) -> tuple[int, str]:
    """Return the number of ranks for this host if the user names none, and why.

    Args:
        gpus: the number of GPUs that the ranks may use.
    """
    if gpus:
        return gpus, "one for each GPU of this host"
    nodes = 0
    usable = os.sched_getaffinity(0)
    for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"):
        nodes += bool(usable & _cpus_of(path.read_text(encoding="ascii").strip()))
    return max(nodes, 1), "one for each NUMA node of this host"


def _cpus_of(text: str) -> set[int]:
    """Return the CPUs in a list of the kernel, such as 0-3,8."""
    cpus: set[int] = set()
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
