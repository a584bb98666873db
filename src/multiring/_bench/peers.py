"""The peers of the bench: how to start a job of each library on one host, and its settings.

A library gets a setting only if its own documentation recommends the setting for one host, and the setting helped in
our measurements. Each setting has its reason and source here, and is written into the results. A worker binds its rank
to the core in the case, for every library; launchers bind nothing.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from multiring._bench import workers
from multiring._bench.install import installed
from multiring._bench.job import JobCommand
from multiring._bench.workers.contract import TORCH_OURS, Case, read_cases
from multiring._settings import inherited_environment
from multiring.errors import ArgumentError, LaunchError

WORKERS = Path(workers.__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """A setting of a library, the cases and numbers of ranks to which it applies, its reason and its source."""

    name: str
    value: str
    when: Callable[[Case, int], bool]
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A library that the bench can time: its worker, its environment (None: multiring's own) and its settings."""

    name: str
    worker: Path
    environment: str | None
    launcher: Callable[["Peer", Path, int, Mapping[str, str]], JobCommand]
    knobs: tuple[Knob, ...] = ()

    def settings(self, case: Case, ranks: int) -> dict[str, str]:
        """Return the library's settings in this case."""
        return {knob.name: knob.value for knob in self.knobs if knob.when(case, ranks)}


def python_of(peer: Peer) -> Path:
    """Return the Python that runs the peer's worker.

    Raises:
        LaunchError: the peer is not installed; the message has the command that installs it.
    """
    if peer.environment is not None:
        return installed(peer.environment) / "bin" / "python"
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(
            f"{peer.name} is not installed: it comes with torch, which {sys.executable} does not have; "
            f"install it with: {sys.executable} -m pip install torch"
        )
    return Path(sys.executable)


def command_of(peer: Peer, ranks: int, worker: Path, case_file: Path) -> JobCommand:
    """Return how to start `worker` on `ranks` ranks of this host, on the cases in `case_file`.

    All cases of a file have the same settings.

    Raises:
        LaunchError: the peer is not installed; the message has the command that installs it.
    """
    python = python_of(peer)
    settings = peer.settings(read_cases(case_file)[0], ranks)
    start = peer.launcher(peer, python, ranks, settings)
    # The worker writes these words, its settings, into the result.
    words = (str(worker), str(case_file), *(f"{name}={value}" for name, value in settings.items()))
    return JobCommand(command=(*start.command, *words), variables={"OMP_NUM_THREADS": "1", **start.variables})


def peer_named(name: str, others: Iterable[str] = ()) -> Peer:
    """Return the peer called `name`.

    Raises:
        ArgumentError: there is no such peer; the message lists the peers and `others`.
    """
    if name not in PEERS:
        raise ArgumentError(f"unknown library {name!r}, want one of {', '.join([*PEERS, *others])}")
    return PEERS[name]


# ---- how to start each peer ----


def _torch(_: Peer, python: Path, ranks: int, settings: Mapping[str, str]) -> JobCommand:
    command = (str(python), "-m", "multiring", "run", "-n", str(ranks), "--", str(python))
    return JobCommand(command=command, variables=settings)


def _mpich(_: Peer, python: Path, ranks: int, settings: Mapping[str, str]) -> JobCommand:
    command = (str(python.parent / "mpiexec"), "-n", str(ranks), "-bind-to", "none", str(python), *_ABORTING)
    return JobCommand(command=command, variables=settings)


def _openmpi(_: Peer, python: Path, ranks: int, settings: Mapping[str, str]) -> JobCommand:
    options = ("-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
    parameters = (word for name, value in settings.items() for word in ("--mca", name, value))
    command = (str(python.parent / "mpiexec"), *options, *parameters, str(python), *_ABORTING)
    variables = {
        # https://docs.open-mpi.org/en/v5.0.x/launching-apps/localhost.html: mpiexec needs both to run as root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return JobCommand(command=command, variables=variables)


def _horovod(_: Peer, python: Path, ranks: int, settings: Mapping[str, str]) -> JobCommand:
    command = (str(python.parent / "horovodrun"), "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", str(python))
    path = f"{python.parent}:{inherited_environment().get('PATH', '')}"
    return JobCommand(command=command, variables={**settings, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"})


# A rank that fails ends the job. Without mpi4py.run, MPI would wait for the rank:
# https://mpi4py.readthedocs.io/en/stable/mpi4py.run.html
_ABORTING = ("-m", "mpi4py")


# ---- the settings of each peer ----


def _always(case: Case, ranks: int) -> bool:  # noqa: ARG001 -- a Knob's `when`
    return True


def _oversubscribed(case: Case, ranks: int) -> bool:
    return ranks > (len(set(case.cores)) or len(os.sched_getaffinity(0)))


def _small_sum(case: Case, ranks: int) -> bool:
    return case.collective == "all_reduce" and case.size_bytes <= 2048 and not _oversubscribed(case, ranks)


# `mpivars` of MPICH's wheel, beside its mpiexec, describes these variables. These settings keep their defaults, which
# were best or made no difference: CMA (on), the POSIX and device collectives, the network module, binding.
_MPICH = (
    Knob(
        name="MPIR_CVAR_CH4_PROGRESS_THROTTLE",
        value="1",
        when=_oversubscribed,
        why="more ranks than cores: polling ranks sleep now and then",
        source="mpivars of MPICH 5.0.2",
    ),
    Knob(
        name="MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT",
        value="64",
        when=_oversubscribed,
        why="polls without progress before such a sleep; the default is 4096",
        source="mpivars of MPICH 5.0.2",
    ),
    Knob(
        name="MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM",
        value="recursive_doubling",
        when=_small_sum,
        why="a third faster than the automatic choice up to MPIR_CVAR_ALLREDUCE_SHORT_MSG_SIZE, slower above",
        source="mpivars of MPICH 5.0.2",
    ),
    Knob(
        name="MPIR_CVAR_DEVICE_COLLECTIVES",
        value="none",
        when=_small_sum,
        why="otherwise the algorithm above is not used",
        source="mpivars of MPICH 5.0.2",
    ),
)
# These settings keep their defaults for the same reasons: single copies by CMA (on), ob1 over sm (the default), han and
# tuned with their own choice of algorithms, binding
# (https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/shared-memory.html).
_OPENMPI = (
    Knob(
        name="mpi_yield_when_idle",
        value="1",
        when=_oversubscribed,
        why="more ranks than cores: a waiting rank yields its core to other ranks",
        source="ompi_info --all of Open MPI 5.0.11; https://docs.open-mpi.org/en/v5.0.x/launching-apps/scheduling.html",
    ),
)
_HOROVOD = (
    Knob(
        name="HOROVOD_CYCLE_TIME",
        value="0.1",
        when=_always,
        why="milliseconds between checks for tensors to reduce; the default, 1, dominates the time of small tensors",
        source="https://horovod.readthedocs.io/en/stable/tensor-fusion.html",
    ),
)

_MPICH_PEER = Peer(name="mpich", worker=WORKERS / "mpi.py", environment="mpich", launcher=_mpich, knobs=_MPICH)
_OPENMPI_PEER = replace(_MPICH_PEER, name="openmpi", environment="openmpi", launcher=_openmpi, knobs=_OPENMPI)


def _window_of(mpi: Peer) -> Peer:
    """Return a peer that reduces by hand in a shared window of `mpi`, without the settings for MPI's own sums."""
    knobs = tuple(knob for knob in mpi.knobs if knob.when is not _small_sum)
    return replace(mpi, name=f"{mpi.name}_window", worker=WORKERS / "shared_window.py", knobs=knobs)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="gloo", worker=WORKERS / "torch_distributed.py", environment=None, launcher=_torch),
        _MPICH_PEER,
        _OPENMPI_PEER,
        Peer(
            name="horovod",
            worker=WORKERS / "horovod_eager.py",
            environment="horovod",
            launcher=_horovod,
            knobs=_HOROVOD,
        ),
        _window_of(_MPICH_PEER),
        _window_of(_OPENMPI_PEER),
        Peer(name=TORCH_OURS, worker=WORKERS / "torch_distributed.py", environment=None, launcher=_torch),
    )
}
