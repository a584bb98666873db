"""What the bench times, as `compare` wants it: multiring, its bound, and the peers; on one host or in a lab."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring.bench.compare import BOUND, OURS, Library, is_ours
from multiring.bench.job import Start
from multiring.bench.peers import Peer, command_of, peer_named, python_of
from multiring.bench.variants import AS_IT_IS, VARIANTS, Variant
from multiring.bench.workers.contract import TORCH_OURS, Case
from multiring.errors import ArgumentError, LaunchError
from multiring.settings import inherited_environment

WORKERS = Path(__file__).parent / "workers"
_IN_LAB = {"gloo": "multiring", TORCH_OURS: "multiring", "mpich": "mpiexec", "openmpi": "mpiexec"}


def engine_of(peer: Peer) -> str:
    """Return what carries a peer's bytes."""
    if peer.worker.name == "shared_window.py":
        return "memory"
    return {"gloo": "tcp", TORCH_OURS: "shm", "horovod": "gloo"}.get(peer.name, "mpi")


# The libraries whose own collectives these are; the others are asked for by name.
USUAL = ("gloo", "mpich", "openmpi", "horovod")

# A launcher of `multiring lab` by its name -> the command line up to the ranks' own.
LabCommand = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnWorker:
    """A library in multiring's own environment; `lab`, where given, starts its ranks instead of `multiring run`.

    `variant` is what is asked of it, in a lab; else it goes as it does by itself.
    """

    name: str
    engine: str
    worker: Path
    lab: LabCommand | None = None
    variant: Variant = AS_IT_IS

    def refusal(self, case: Case) -> str:
        """Return why it does not do `case`."""
        if self.name == BOUND and case.collective == "barrier":
            return "a barrier moves no bytes"
        return self.variant.refusal(case)

    def buffers(self, asked: str) -> str:
        """Return the kind of memory it is timed on where `asked` is asked of ours."""
        return self.variant.buffers or (asked if is_ours(self.name) else "ordinary")

    def settings(self, case: Case, ranks: int) -> Mapping[str, str]:  # noqa: ARG002 -- the same for all
        """Return what is set for it in this case."""
        return self.variant.variables()

    def start(self, case_file: Path, ranks: int) -> Start:
        """Return what starts its job."""
        launcher: tuple[str, ...] = (sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--")
        if self.lab is not None:
            launcher = self.lab(self.variant.launcher)
        command = (*launcher, sys.executable, str(self.worker), str(case_file), *self.variant.words())
        return Start(command=command, variables={"OMP_NUM_THREADS": "1", **self.variant.variables()})


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLibrary:
    """A peer, started on this host as it starts its own; with `lab`, there, under the launcher it has there."""

    peer: Peer
    lab: LabCommand | None = None

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return self.peer.name

    @property
    def engine(self) -> str:
        """What carries its bytes."""
        engine = engine_of(self.peer)
        return engine if self.lab is None or engine != "shm" else "shm+tcp"

    def refusal(self, case: Case) -> str:  # noqa: ARG002 -- the same for all; its worker knows what it does not do
        """Return why it cannot run where it is to."""
        return "" if self.lab is None or self.peer.name in _IN_LAB else "the lab has no launcher for it"

    def buffers(self, asked: str) -> str:  # noqa: ARG002 -- a peer has no arena
        """Return the kind of memory it is timed on."""
        return "ordinary"

    def settings(self, case: Case, ranks: int) -> Mapping[str, str]:
        """Return what is set for it in this case."""
        return self.peer.settings(case, ranks)

    def start(self, case_file: Path, ranks: int) -> Start:
        """Return what starts its job; in a lab the mpiexec of its own environment comes first on PATH."""
        direct = command_of(self.peer, ranks, self.peer.worker, case_file)
        return direct if self.lab is None else _start_in_lab(self.peer, self.lab, direct)


def _start_in_lab(peer: Peer, lab: LabCommand, direct: Start) -> Start:
    """Return what starts in a lab what `direct` starts on this host."""
    python = python_of(peer)
    # What follows the case's file is what was set, for the worker to write down.
    words = direct.command[direct.command.index(str(peer.worker)) :]
    launcher = _IN_LAB[peer.name]
    path = f"{python.parent}:{inherited_environment().get('PATH', '')}"
    before = (str(python), "-m", "mpi4py") if launcher == "mpiexec" else (str(python),)
    variables = {**direct.variables, "PATH": path}
    if peer.name == "openmpi":
        # https://docs.open-mpi.org/en/v5.0.x/mca.html: a parameter is set on mpiexec's command line, or like this.
        variables |= {f"OMPI_MCA_{name}": value for name, _, value in (word.partition("=") for word in words[2:])}
    return Start(command=(*lab(launcher), *before, *words), variables=variables)


def _variant(name: str, lab: LabCommand | None) -> Library:
    variant = VARIANTS[name]
    if lab is None and variant.is_for_hosts:
        raise ArgumentError(f"{name} differs in what goes between hosts: say how many there are with --hosts H")
    variant.variables()  # or it is not installed
    engine = "shm" if lab is None else variant.engine
    return OwnWorker(name=name, engine=engine, worker=WORKERS / "multiring_worker.py", lab=lab, variant=variant)


def libraries(against: Sequence[str] | None, lab: LabCommand | None = None) -> tuple[list[Library], list[str]]:
    """Return multiring, the peers and, on one host, the bound; and a line on each peer that is left out.

    Args:
        against: peers and variants by name, or None for the usual peers that are installed.
        lab: how a lab's launcher is called, where the ranks are to run in one.

    Raises:
        ArgumentError: an unknown peer, one named twice, or a variant where there is one host only.
        LaunchError: a peer that was asked for is not installed; names the command that installs it.
    """
    engine = "shm" if lab is None else "shm+tcp"
    chosen: list[Library] = [OwnWorker(name=OURS, engine=engine, worker=WORKERS / "multiring_worker.py", lab=lab)]
    left_out = []
    if against is not None and len(set(against)) != len(against):
        raise ArgumentError(f"--against {','.join(against)} names one twice")
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
