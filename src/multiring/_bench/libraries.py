"""The libraries that the bench times: multiring, its bound, and the peers, on one host or in a lab."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring._bench.compare import BOUND, OURS, Library, is_ours
from multiring._bench.job import JobCommand
from multiring._bench.peers import Peer, command_of, peer_named, python_of
from multiring._bench.variants import AS_IT_IS, VARIANTS, Variant
from multiring._bench.workers.contract import TORCH_OURS, Case
from multiring._settings import inherited_environment
from multiring.errors import ArgumentError, LaunchError

WORKERS = Path(__file__).parent / "workers"
_IN_LAB = {"gloo": "multiring", TORCH_OURS: "multiring", "mpich": "mpiexec", "openmpi": "mpiexec"}


def engine_of(peer: Peer) -> str:
    """Return the engine that carries a peer's bytes."""
    if peer.worker.name == "shared_window.py":
        return "memory"
    return {"gloo": "tcp", TORCH_OURS: "shm", "horovod": "gloo"}.get(peer.name, "mpi")


# Libraries with collectives of their own; users ask for the other libraries by name.
USUAL = ("gloo", "mpich", "openmpi", "horovod")

# Maps the name of a launcher of `multiring lab` to the command line in front of the ranks' own command.
LabCommand = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnWorker:
    """A library in multiring's own environment.

    `lab`, if given, starts its ranks instead of `multiring run`.

    `variant` changes its settings; by default multiring runs as usual.
    """

    name: str
    engine: str
    worker: Path
    lab: LabCommand | None = None
    variant: Variant = AS_IT_IS

    def refusal(self, case: Case) -> str:
        """Return why the library cannot run `case`, or ""."""
        if self.name == BOUND and case.collective == "barrier":
            return "a barrier moves no bytes"
        return self.variant.refusal(case)

    def buffers(self, asked: str) -> str:
        """Return the library's kind of memory, if the user asks multiring to use `asked`."""
        return self.variant.buffers or (asked if is_ours(self.name) else "ordinary")

    def settings(self, case: Case, ranks: int) -> Mapping[str, str]:  # noqa: ARG002 -- the same for all
        """Return the library's settings, which are the same for all cases."""
        return self.variant.variables()

    def start(self, case_file: Path, ranks: int) -> JobCommand:
        """Return how to start a job of the library's worker on the cases in `case_file`."""
        launcher: tuple[str, ...] = (sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--")
        if self.lab is not None:
            launcher = self.lab(self.variant.launcher)
        command = (*launcher, sys.executable, str(self.worker), str(case_file), *self.variant.words())
        return JobCommand(command=command, variables={"OMP_NUM_THREADS": "1", **self.variant.variables()})


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLibrary:
    """A peer, started by its own launcher on this host, or by the lab's launcher if `lab` is given."""

    peer: Peer
    lab: LabCommand | None = None

    @property
    def name(self) -> str:
        """The peer's name on the command line."""
        return self.peer.name

    @property
    def engine(self) -> str:
        """The engine that carries the peer's bytes."""
        engine = engine_of(self.peer)
        return engine if self.lab is None or engine != "shm" else "shm+tcp"

    def refusal(self, case: Case) -> str:  # noqa: ARG002 -- the same for all; its worker rejects cases
        """Return why the peer cannot run in the lab, or ""."""
        return "" if self.lab is None or self.peer.name in _IN_LAB else "the lab has no launcher for it"

    def buffers(self, asked: str) -> str:  # noqa: ARG002 -- a peer has no arena
        """Return the peer's kind of memory."""
        return "ordinary"

    def settings(self, case: Case, ranks: int) -> Mapping[str, str]:
        """Return the peer's settings in this case."""
        return self.peer.settings(case, ranks)

    def start(self, case_file: Path, ranks: int) -> JobCommand:
        """Return how to start a job of the peer's worker on the cases in `case_file`.

        In a lab, the mpiexec of the peer's own environment comes first on PATH.
        """
        direct = command_of(self.peer, ranks, self.peer.worker, case_file)
        return direct if self.lab is None else _start_in_lab(self.peer, self.lab, direct)


def _start_in_lab(peer: Peer, lab: LabCommand, direct: JobCommand) -> JobCommand:
    """Return how to start the command of `direct` in a lab."""
    python = python_of(peer)
    # The words after the case file are the settings, which the worker writes into its answer.
    words = direct.command[direct.command.index(str(peer.worker)) :]
    launcher = _IN_LAB[peer.name]
    path = f"{python.parent}:{inherited_environment().get('PATH', '')}"
    before = (str(python), "-m", "mpi4py") if launcher == "mpiexec" else (str(python),)
    variables = {**direct.variables, "PATH": path}
    if peer.name == "openmpi":
        # https://docs.open-mpi.org/en/v5.0.x/mca.html: parameters are set by mpiexec's command line, or by variables.
        variables |= {f"OMPI_MCA_{name}": value for name, _, value in (word.partition("=") for word in words[2:])}
    return JobCommand(command=(*lab(launcher), *before, *words), variables=variables)


def _variant(name: str, lab: LabCommand | None) -> Library:
    variant = VARIANTS[name]
    if lab is None and variant.is_for_hosts:
        raise ArgumentError(
            f"{name} differs from multiring only between hosts: give the number of hosts with --hosts H"
        )
    variant.variables()  # fails if the variant's MPI is not installed
    engine = "shm" if lab is None else variant.engine
    return OwnWorker(name=name, engine=engine, worker=WORKERS / "multiring_worker.py", lab=lab, variant=variant)


def libraries(against: Sequence[str] | None, lab: LabCommand | None = None) -> tuple[list[Library], list[str]]:
    """Return the libraries to time, and a message for each peer that is left out.

    The libraries are multiring, the peers and, on one host, the bound.

    Args:
        against: names of peers and variants; by default the usual peers that are installed.
        lab: how to call a lab's launcher, if the ranks run in a lab.

    Raises:
        ArgumentError: a peer is unknown or named twice, or a variant needs several hosts.
        LaunchError: a named peer is not installed; the message has the command that installs it.
    """
    engine = "shm" if lab is None else "shm+tcp"
    chosen: list[Library] = [OwnWorker(name=OURS, engine=engine, worker=WORKERS / "multiring_worker.py", lab=lab)]
    left_out = []
    if against is not None and len(set(against)) != len(against):
        raise ArgumentError(f"--against {','.join(against)} names a library twice")
    for name in USUAL if against is None else against:
        if name in VARIANTS:
            chosen.append(_variant(name, lab))
            continue
        peer = peer_named(name, VARIANTS)
        try:
            python_of(peer)
        except LaunchError as error:
            if against is not None:
                raise
            left_out.append(str(error))
            continue
        chosen.append(PeerLibrary(peer=peer, lab=lab))
    if lab is None:
        chosen.append(OwnWorker(name=BOUND, engine="memory", worker=WORKERS / "bound.py"))
    return chosen, left_out
