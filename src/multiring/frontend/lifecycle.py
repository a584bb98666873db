"""Who this process is: init, shutdown, and what can be asked between them. The names are Horovod's."""

import importlib.util
import threading
from typing import Any

from multiring import runtime
from multiring.errors import ArgumentError, MultiringError
from multiring.frontend.horovod_words import speaks_horovod
from multiring.frontend.mpi_communicators import is_communicator, ranks_of, require_job_is_world
from multiring.frontend.process_sets import close_sets, know_sets, open_sets, place_now, world_now
from multiring.runtime.job.job import is_rank
from multiring.runtime.job.world import World
from multiring.settings import Settings

_DYNAMIC = "dynamic"
_changing = threading.RLock()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job. Where this process has joined it already, only see to it that `process_sets` are known ones.

    Who this process is comes from what started it, and settings from the environment, MULTIRING_* and HOROVOD_*, as it
    is now. Blocks until every rank has called it.

    Args:
        comm: None or all ranks of the job, or a communicator of mpi4py's that has them all; for fewer there are
            process sets.
        process_sets: the same on all ranks; or "dynamic", which allows `add_process_set` later, as
            HOROVOD_DYNAMIC_PROCESS_SETS=1 does.

    Raises:
        ArgumentError: process sets that are the same, or no ranks, or a communicator; a setting makes no sense.
        RendezvousError: the ranks did not find each other.
        LaunchError: the launcher's ranks cannot meet as things are.
    """
    by_mpi = is_communicator(comm)
    if by_mpi:
        comm = ranks_of(comm)
    if comm is not None and not (isinstance(comm, list | tuple) and all(isinstance(rank, int) for rank in comm)):
        built = "; Horovod has not been built with MPI support" if speaks_horovod() else ""
        raise ArgumentError(f"comm={comm!r}: want None, or a list of ranks{built}")
    with _changing:
        by_name = isinstance(process_sets, str)
        if isinstance(process_sets, str) and process_sets.lower() != _DYNAMIC:
            raise ArgumentError(f"process_sets={process_sets!r}: want ProcessSet objects, or {_DYNAMIC!r}")
        sets = [] if by_name or process_sets is None else list(process_sets)
        if is_rank():
            know_sets(sets)
            return
        settings = Settings.from_environment(horovod=True)
        runtime.init(settings)
        if not is_rank():  # a multiprocessing worker of one
            return
        try:
            if by_mpi:
                require_job_is_world(rank(), size())
            if comm and sorted(comm) != list(range(size())):
                raise ArgumentError(f"comm={comm}: want all {size()} ranks; for fewer make a ProcessSet of them")
            open_sets(sets, is_dynamic=by_name or settings.dynamic_process_sets)
        except (MultiringError, RuntimeError):
            shutdown()
            raise


def shutdown() -> None:
    """Leave the job. What is in flight then fails; `init` may join it anew."""
    with _changing:
        close_sets()
        runtime.shutdown()


def is_initialized() -> bool:
    """Return whether this process is in a job now, or is a multiprocessing worker of one that is."""
    return runtime.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 to size() - 1; ValueError outside `init` and `shutdown`, as of all below."""
    return place_now().rank


def size() -> int:
    """Return how many ranks the job has."""
    return place_now().size


def local_rank() -> int:
    """Return this process's rank among those of its host."""
    return place_now().local_rank


def local_size() -> int:
    """Return how many ranks this host has."""
    return place_now().local_size


def cross_rank() -> int:
    """Return this host's place among those that have a rank of this local rank."""
    world = world_now()
    return next(i for i, ranks in enumerate(_beside(world)) if world.membership.rank in ranks)


def cross_size() -> int:
    """Return how many hosts have a rank of this local rank."""
    return len(_beside(world_now()))


def is_homogeneous() -> bool:
    """Return whether all hosts have as many ranks."""
    return len({len(ranks) for ranks in world_now().group.topology.hosts}) == 1


def _beside(world: World) -> list[tuple[int, ...]]:
    return [ranks for ranks in world.group.topology.hosts if len(ranks) > world.local_rank]


def mpi_threads_supported() -> bool:
    """Return whether this program may use MPI from several threads beside multiring.

    Raises:
        ArgumentError: MPI carries nothing here.
    """
    world = world_now()
    if world.engine is None:
        enabled = "Horovod MPI is not enabled: " if speaks_horovod() else ""
        raise ArgumentError(f"{enabled}MPI carries no bytes in this job; MULTIRING_ENGINE=mpi has it do so")
    return world.engine.serves_threads


def mpi_enabled() -> bool:
    """Return whether MPI carries bytes between hosts in this job."""
    return is_rank() and world_now().engine is not None


def mpi_built() -> bool:
    """Return whether MPI could carry bytes: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether ranks meet without MPI, which programs ask by the name of Gloo."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Return True: ranks can always meet without MPI."""
    return True


def nccl_built() -> int:
    """Return 0: NCCL carries nothing."""
    return 0


def ddl_built() -> bool:
    """Return False: IBM's DDL carries nothing."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL carries nothing."""
    return False


def cuda_built() -> bool:
    """Return False: multiring moves host memory."""
    return False


def rocm_built() -> bool:
    """Return False: multiring moves host memory."""
    return False
