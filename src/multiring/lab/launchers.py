"""Return the processes that each launcher starts in a lab.

They are plain values, which can be checked without a lab.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from multiring._launch.mpiexec import Mpiexec, mpiexec_of, placement
from multiring.lab.host import AGENT
from multiring.lab.plan import LabPlan, host_name

_RENDEZVOUS_PORT = 29400  # always free, because a new host runs nothing else
_MASTER_PORT = 29500
# Open MPI's daemons keep their state in folders named after host and process ID. All labs use the same few names and
# IDs. In /tmp, which the hosts share, a daemon could take the state of another or of a killed daemon for its own. Every
# process of a host gets these variables, because a user may start mpiexec there.
OPEN_MPI_STATE = {
    "PRTE_MCA_prte_tmpdir_base": "/dev/shm",  # noqa: S108 -- on the host's own tmpfs; Open MPI 5
    "OMPI_MCA_orte_tmpdir_base": "/dev/shm",  # noqa: S108 -- Open MPI 4
}


class Launcher(Enum):
    """The launcher that starts the ranks. The value is its spelling."""

    MULTIRING = "multiring"
    MPIEXEC = "mpiexec"
    TORCHRUN = "torchrun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process that the lab itself starts on `host`.

    `settings` are values of multiring's settings by field name.
    """

    name: str
    tag: str
    log_name: str
    host: int
    command: tuple[str, ...]
    settings: Mapping[str, object]
    variables: Mapping[str, str] = field(default_factory=dict)


def processes_of(
    plan: LabPlan, launcher: Launcher, command: Sequence[str], mpi: str, place: Mapping[str, object]
) -> list[Process]:
    """Return the processes to start so that `command` runs on every slot.

    The ranks are in the order of hosts.

    Args:
        plan: the plan of the lab.
        launcher: the launcher of the ranks.
        command: the command of a rank.
        mpi: the output of `mpiexec --version`, needed for the launcher mpiexec only.
        place: settings of the job: its name, its secret and its topology file.

    Raises:
        UnsupportedError: `mpi` is the output of an unknown mpiexec.
    """
    meeting = {**place, "rendezvous": f"{host_name(0)}:{_RENDEZVOUS_PORT}"}
    if launcher is Launcher.MPIEXEC:
        arguments, variables = _mpiexec(plan, mpi)
        # No rendezvous is set, because the ranks agree on a rendezvous over MPI.
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


def _torchrun(plan: LabPlan, host: int) -> list[str]:
    return [
        f"--nnodes={plan.hosts}",
        f"--node-rank={host}",
        f"--nproc-per-node={plan.slots_of_hosts[host]}",
        f"--master-addr={host_name(0)}",
        f"--master-port={_MASTER_PORT}",
        # Run the command unchanged, like the other launchers. By default torchrun puts `python` before it.
        "--no-python",
    ]


def _mpiexec(plan: LabPlan, version: str) -> tuple[list[str], dict[str, str]]:
    kind = mpiexec_of(version)
    # Do not bind ranks to cores. The hosts share this machine's cores, so the ranks of all hosts would be bound to the
    # first cores.
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
