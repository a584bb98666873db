"""What each launcher starts in a lab, and where: plain values, so that they can be looked at without one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multiring.lab.host import AGENT
from multiring.lab.plan import Plan, host_name
from multiring.launch.mpiexec import Mpiexec, mpiexec_of, placement

_RENDEZVOUS_PORT = 29400  # free: nothing else is on a host that was just made
_MASTER_PORT = 29500
# Open MPI's daemons keep their state in folders named by host and process number. In all labs these are the same few,
# so in the /tmp that hosts share a daemon would take another's state, or what a killed one left, for its own. For every
# process of a host, since an mpiexec may be started by hand there.
OPEN_MPI_STATE = {
    "PRTE_MCA_prte_tmpdir_base": "/dev/shm",  # noqa: S108 -- on the host's own tmpfs; Open MPI 5
    "OMPI_MCA_orte_tmpdir_base": "/dev/shm",  # noqa: S108 -- Open MPI 4
}


class Launcher(Enum):
    """Who starts the ranks. The value is how it is spelt."""

    MULTIRING = "multiring"
    MPIEXEC = "mpiexec"
    TORCHRUN = "torchrun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process that the lab itself starts on `host`; `settings` are multiring's, by field name."""

    name: str
    tag: str
    log_name: str
    host: int
    command: tuple[str, ...]
    settings: Mapping[str, object]
    variables: Mapping[str, str] = field(default_factory=dict)


def processes_of(
    plan: Plan, launcher: Launcher, command: Sequence[str], mpi: str, place: Mapping[str, object]
) -> list[Process]:
    """Return what `launcher` starts so that `command` runs on every slot of `plan`, ranks in the order of hosts.

    Args:
        plan: the lab.
        launcher: who starts the ranks.
        command: what a rank runs.
        mpi: what `mpiexec --version` says; read for mpiexec only.
        place: the job's name and secret, and where its topology is told, as settings.

    Raises:
        UnsupportedError: `mpi` is no MPI whose launcher is known.
    """
    meeting = {**place, "rendezvous": f"{host_name(0)}:{_RENDEZVOUS_PORT}"}
    if launcher is Launcher.MPIEXEC:
        arguments, variables = _mpiexec(plan, mpi)
        # No rendezvous: the ranks agree on one over that MPI.
        return [
            Process(
                name="mpiexec",
                tag="",
                log_name="mpiexec",
                host=0,
                command=("mpiexec", *arguments, *command),
                settings=place,
                variables=variables,
            )
        ]
    if launcher is Launcher.TORCHRUN:
        return [
            Process(
                name=f"torchrun {host}",
                tag=f"[{host_name(host)}] ",
                log_name=f"torchrun-{host}",
                host=host,
                command=("torchrun", *_torchrun(plan, host), *command),
                settings=meeting,
            )
            for host in range(plan.hosts)
        ]
    return [
        Process(
            name=f"rank {rank}",
            tag=f"[{rank}] ",
            log_name=f"rank-{rank}",
            host=host,
            command=tuple(command),
            settings={
                **meeting,
                "rank": rank,
                "size": plan.num_ranks,
                "local_rank": local,
                "local_size": plan.slots_of_hosts[host],
            },
        )
        for rank, (host, local) in enumerate(plan.seats())
    ]


def _torchrun(plan: Plan, host: int) -> list[str]:
    return [
        f"--nnodes={plan.hosts}",
        f"--node-rank={host}",
        f"--nproc-per-node={plan.slots_of_hosts[host]}",
        f"--master-addr={host_name(0)}",
        f"--master-port={_MASTER_PORT}",
        # The command is run as it is, as every launcher here does; torchrun would put a python before it.
        "--no-python",
    ]


def _mpiexec(plan: Plan, version: str) -> tuple[list[str], dict[str, str]]:
    kind = mpiexec_of(version)
    # Nothing is bound: the hosts share this machine's cores, and host by host all ranks would be on the first ones.
    options = placement(kind, [(host_name(host), slots) for host, slots in enumerate(plan.slots_of_hosts)])
    if kind is Mpiexec.HYDRA:
        return ["-launcher", "ssh", "-launcher-exec", AGENT, *options], {}
    variables = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_plm_ssh_agent": AGENT,  # Open MPI 5
        "OMPI_MCA_plm_rsh_agent": AGENT,  # Open MPI 4
    }
    return options, variables
