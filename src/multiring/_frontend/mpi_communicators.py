"""Translate mpi4py's communicators, with which a program may select ranks, to the job's ranks."""

import sys
from typing import Any

from multiring.errors import ArgumentError


def is_communicator(value: object) -> bool:
    """Return whether `value` is an mpi4py communicator. This does not import mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(value, mpi.Comm)


def ranks_of(comm: Any) -> list[int]:
    """Return the communicator's ranks in its order, as numbered in MPI_COMM_WORLD.

    The call is local. The result is empty for MPI_COMM_NULL.
    """
    mpi: Any = sys.modules["mpi4py.MPI"]
    if comm == mpi.COMM_NULL:
        return []
    group = comm.Get_group()
    return [int(rank) for rank in mpi.Group.Translate_ranks(group, range(group.Get_size()), mpi.COMM_WORLD.Get_group())]


def require_job_is_world(rank: int, size: int) -> None:
    """Raise ArgumentError unless MPI_COMM_WORLD and the job number this process alike.

    Args:
        rank: this process's rank in the job.
        size: the number of ranks in the job.
    """
    world: Any = vars(sys.modules["mpi4py.MPI"])["COMM_WORLD"]
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        raise ArgumentError(
            f"got an MPI communicator, but in MPI this process is rank {world.Get_rank()} of {world.Get_size()}, and "
            f"in the job it is rank {rank} of {size}: start the program with mpiexec, or pass lists of ranks"
        )
