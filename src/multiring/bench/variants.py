"""Multiring in other ways than it goes by itself: libraries of their own in a comparison, so that they take turns."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from multiring.bench.install import installed
from multiring.bench.workers.contract import Case
from multiring.settings import environment_of, inherited_environment

# What mpi4py is told to load in place of the MPI it would find: the wheel's own library.
_LIBRARY = MappingProxyType({"mpich": "libmpi.so.12"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What is asked of multiring: a wire type or the peer whose MPI carries bytes, between hosts; a kind of memory."""

    wire: str = ""
    mpi: str = ""
    buffers: str = ""  # "arena" or "ordinary", whatever the bench's --buffers says

    @property
    def is_for_hosts(self) -> bool:
        """Whether it differs from multiring as it goes by itself only in what goes between hosts."""
        return not self.buffers

    @property
    def launcher(self) -> str:
        """Which of a lab's launchers starts its ranks."""
        return "mpiexec" if self.mpi else "multiring"

    @property
    def engine(self) -> str:
        """What carries its bytes."""
        return "shm+mpi" if self.mpi else "shm+tcp"

    def variables(self) -> dict[str, str]:
        """Return what is added to the environment of its job.

        Raises:
            LaunchError: the MPI is not installed; names the command that installs it.
        """
        if not self.mpi:
            return {}
        home = installed(self.mpi)
        path = f"{home / 'bin'}:{inherited_environment().get('PATH', '')}"
        library = str(home / "lib" / _LIBRARY[self.mpi])
        return {"PATH": path, "MPI4PY_LIBMPI": library, **environment_of(engine="mpi")}

    def words(self) -> tuple[str, ...]:
        """Return what its worker is told behind the case's file."""
        return (f"wire={self.wire}",) if self.wire else ()

    def refusal(self, case: Case) -> str:
        """Return why it does not do `case`; "" where it does."""
        if self.wire and (case.collective != "all_reduce" or case.dtype != "float32"):
            return f"a wire type is for all_reduce of float32, not {case.collective} of {case.dtype}"
        return ""


AS_IT_IS = Variant()
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "multiring-fp16": Variant(wire="fp16"),
        "multiring-bf16": Variant(wire="bf16"),
        "multiring-int8": Variant(wire="int8"),
        "multiring-mpi": Variant(mpi="mpich"),
        "multiring-ordinary": Variant(buffers="ordinary"),
    }
)
