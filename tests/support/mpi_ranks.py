"""Ranks started by mpiexec, for the mpi engine, which needs an MPI launcher.

    python -m tests.support.mpi_ranks REQUEST

runs one rank: it calls the function that the file names, and writes the result beside the file.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.support.nursery import Here

from multiring._bench.install import installed
from multiring._settings import environment_of

ROOT = Path(__file__).parents[2]
LIBRARY = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
# Settings of each MPI for more ranks than cores: idle ranks yield. Ranks of the other MPI ignore them.
YIELDING = {
    "mpich": {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1", "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "64"},
    "openmpi": {"OMPI_MCA_mpi_yield_when_idle": "1"},
}


def mpi_start(mpi: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the command prefix and the variables that start `ranks` ranks of that MPI on this host."""
    home = installed(mpi)
    variables = {"MPI4PY_LIBMPI": str(home / "lib" / LIBRARY[mpi]), **YIELDING[mpi]}
    prefix = [str(home / "bin" / "mpiexec"), "-n", str(ranks)]
    if mpi == "openmpi":
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OPAL_PREFIX": str(home)}
        prefix += ["--oversubscribe", "--bind-to", "none"]
    return prefix, variables


def run_by_mpiexec(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    engine: str,
    mpi: str = "mpich",
    deadline_s: float,
    **settings: Any,
) -> list[Any]:
    """Return the result of `function(here, *arguments)` on each rank; see `ranks.run_ranks`.

    Raises:
        AssertionError: a rank raised or did not end.
    """
    prefix, variables = mpi_start(mpi, ranks)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= variables | environment_of(engine="mpi", **settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = (function.__module__, function.__qualname__, arguments, engine)
        (folder / "request").write_bytes(pickle.dumps(request))
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "tests.support.mpi_ranks", str(folder / "request")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert done.returncode == 0, f"{engine} by {mpi}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return [pickle.loads((folder / f"value-{rank}").read_bytes()) for rank in range(ranks)]  # noqa: S301 -- our own


def live(request: Path) -> int:
    """Run one rank: call the requested function and store its result."""
    module, qualname, arguments, engine = pickle.loads(request.read_bytes())  # noqa: S301 -- our own
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    function: Any = importlib.import_module(module)
    for name in qualname.split("."):
        function = getattr(function, name)
    here = Here(world.Get_rank(), world.Get_size(), engine, Pipe()[0])
    try:
        value = function(here, *arguments)
    except BaseException:  # noqa: BLE001 -- the others would wait for this rank at their end
        traceback.print_exc()
        world.Abort(1)
    (request.parent / f"value-{here.rank}").write_bytes(pickle.dumps(value))
    return 0


if __name__ == "__main__":
    sys.exit(live(Path(sys.argv[1])))
