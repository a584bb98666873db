"""init, shutdown, and queries of this process's position in the job, with Horovod's names."""

from typing import Any

from multiring import _runtime as runtime
from multiring._forks import ForkSafeLock
from multiring._frontend.horovod_words import speaks_horovod
from multiring._frontend.mpi_communicators import is_communicator, ranks_of, require_job_is_world
from multiring._frontend.process_sets import close_sets, know_sets, open_sets, place_now, promise_sets, world_now
from multiring._runtime.job.job import is_rank, waits_outside
from multiring._runtime.job.world import World
from multiring._settings import Settings
from multiring.errors import ArgumentError, MultiringError

_DYNAMIC = "dynamic"
_changing = ForkSafeLock(reentrant=True)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job, and wait until every rank has called it.

    If this process has joined already, the call only checks that the job has these ranks and process sets. The launcher
    determines the rank. Settings come from the current environment variables MULTIRING_* and HOROVOD_*.

    Args:
        comm: None, or all ranks of the job, or an mpi4py communicator of all ranks. For fewer ranks use process sets.
        process_sets: process sets to create, the same on all ranks. "dynamic" allows `add_process_set` later, like
            HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Raises:
        ArgumentError: `comm` does not have exactly the job's ranks, two process sets are equal, or a setting is
            invalid. In a second call: the job was joined without one of `process_sets`.
        RendezvousError: the ranks did not find each other.
        LaunchError: the ranks cannot start as the launcher configured them; the message says what to change.
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
            _require_all(comm)
            know_sets(sets, is_dynamic=by_name)
            return
        settings = Settings.from_environment(horovod=True)
        runtime.init(settings)
        if not is_rank():  # this process is a multiprocessing worker of a rank
            return
        try:
            if by_mpi:
                require_job_is_world(rank(), size())
            _require_all(comm)
            is_dynamic = by_name or settings.dynamic_process_sets
            (promise_sets if waits_outside() else open_sets)(sets, is_dynamic=is_dynamic)
        except (MultiringError, RuntimeError):
            shutdown()
            raise


def _require_all(comm: Any) -> None:
    if comm and sorted(comm) != list(range(size())):
        raise ArgumentError(f"comm={comm}: want all {size()} ranks; for fewer ranks, make a ProcessSet")


def shutdown() -> None:
    """Leave the job. Operations in flight fail. The process may call `init` again."""
    with _changing:
        close_sets()
        runtime.shutdown()


def is_initialized() -> bool:
    """Return whether this process is in a job now.

    A multiprocessing worker is in the job of the process that started it.
    """
    return runtime.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 to size() - 1.

    Before `init` and after `shutdown`, this query and the queries below raise ValueError.
    """
    return place_now().rank


def size() -> int:
    """Return the number of ranks in the job."""
    return place_now().size


def local_rank() -> int:
    """Return this process's rank among the ranks on its host."""
    return place_now().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return place_now().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a rank with this local rank."""
    world = world_now()
    return next(i for i, ranks in enumerate(_beside(world)) if world.membership.rank in ranks)


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return len(_beside(world_now()))


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len({len(ranks) for ranks in world_now().group.topology.hosts}) == 1


def _beside(world: World) -> list[tuple[int, ...]]:
    members = world.membership
    return [ranks for ranks in members.topology.hosts if len(ranks) > members.local_ranks.index(members.rank)]


def mpi_threads_supported() -> bool:
    """Return whether this program may use MPI from several threads while multiring uses it.

    Raises:
        ArgumentError: this job does not use MPI.
    """
    world = world_now()
    if world.engine is None:
        enabled = "Horovod MPI is not enabled: " if speaks_horovod() else ""
        raise ArgumentError(f"{enabled}MPI carries no bytes in this job; to use MPI, set MULTIRING_ENGINE=mpi")
    return world.engine.serves_threads
