"""Horovod's questions about its build, which the adapters answer by attribute without listing them as public names."""

import importlib.util

from multiring._frontend.process_sets import world_now
from multiring._runtime.job.job import is_rank

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "nccl_built",
    "rocm_built",
]


def mpi_enabled() -> bool:
    """Return whether MPI carries bytes between hosts in this job."""
    return is_rank() and world_now().engine is not None


def mpi_built() -> bool:
    """Return whether multiring can use MPI: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether the job runs without MPI; in Horovod, this mode is called Gloo."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Return True: a job can always run without MPI."""
    return True


def nccl_built() -> int:
    """Return 0: multiring does not use NCCL."""
    return 0


def ddl_built() -> bool:
    """Return False: multiring does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: multiring does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Return False: multiring moves host memory."""
    return False


def rocm_built() -> bool:
    """Return False: multiring moves host memory."""
    return False
