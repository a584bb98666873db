"""MPI's communicators, for programs that say by them which ranks they mean: what they hold, in the job's numbers."""

import sys
from typing import Any

from multiring.errors import ArgumentError


def is_communicator(value: object) -> bool:
    """Return whether `value` is one of mpi4py's; without importing that."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(value, mpi.Comm)


def ranks_of(comm: Any) -> list[int]:
    """Return the ranks of a communicator as MPI_COMM_WORLD numbers them, in its order; local. None of MPI_COMM_NULL."""
    mpi: Any = sys.modules["mpi4py.MPI"]
    if comm == mpi.COMM_NULL:
        return []
    group = comm.Get_group()
    return [int(rank) for rank in mpi.Group.Translate_ranks(group, range(group.Get_size()), mpi.COMM_WORLD.Get_group())]


def require_job_is_world(rank: int, size: int) -> None:
    """Raise ArgumentError unless MPI_COMM_WORLD numbers this process as the job does: as rank `rank` of `size`."""
    world: Any = vars(sys.modules["mpi4py.MPI"])["COMM_WORLD"]
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        raise ArgumentError(
            f"a communicator of MPI, where this process is rank {world.Get_rank()} of {world.Get_size()}; in the job "
            f"it is rank {rank} of {size}: start the program with mpiexec, or give lists of ranks"
        )
