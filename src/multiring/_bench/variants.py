"""Variants of multiring with other settings, which take turns with the other libraries in a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from multiring._bench.install import installed
from multiring._bench.workers.contract import Case
from multiring._schedule import WIRES
from multiring._settings import environment_of, inherited_environment

# mpi4py loads this library of the wheel instead of searching for an MPI.
_LIBRARY = MappingProxyType({"mpich": "libmpi.so.12"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Settings of multiring: a wire type or an MPI for messages between hosts, or a kind of memory."""

    wire: str = ""
    mpi: str = ""
    buffers: str = ""  # "arena" or "ordinary", overrides the bench's --buffers

    @property
    def is_for_hosts(self) -> bool:
        """Return whether the variant differs from plain multiring only between hosts."""
        return not self.buffers

    @property
    def launcher(self) -> str:
        """The lab's launcher that starts the variant's ranks."""
        return "mpiexec" if self.mpi else "multiring"

    @property
    def engine(self) -> str:
        """The engine that carries the variant's bytes."""
        return "shm+mpi" if self.mpi else "shm+tcp"

    def variables(self) -> dict[str, str]:
        """Return the variables that are added to the environment of the variant's job.

        Raises:
            LaunchError: the MPI is not installed; the message has the command that installs it.
        """
        if not self.mpi:
            return {}
        home = installed(self.mpi)
        path = f"{home / 'bin'}:{inherited_environment().get('PATH', '')}"
        library = str(home / "lib" / _LIBRARY[self.mpi])
        return {"PATH": path, "MPI4PY_LIBMPI": library, **environment_of(engine="mpi")}

    def words(self) -> tuple[str, ...]:
        """Return the arguments that follow the case file on the worker's command line."""
        return (f"wire={self.wire}",) if self.wire else ()

    def refusal(self, case: Case) -> str:
        """Return why the variant cannot run `case`, or ""."""
        if self.wire and (case.collective != "all_reduce" or case.dtype != "float32"):
            return f"a wire type is for all_reduce of float32, not {case.collective} of {case.dtype}"
        return ""


AS_IT_IS = Variant()
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        **{f"multiring-{wire}": Variant(wire=wire) for wire in WIRES},
        "multiring-mpi": Variant(mpi="mpich"),
        "multiring-ordinary": Variant(buffers="ordinary"),
    }
)
