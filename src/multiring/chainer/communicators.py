"""create_communicator: which communicators there are, by ChainerMN's names."""

from typing import Any

from chainermn.communicators import CommunicatorBase

from multiring.chainer.communicator import Communicator
from multiring.chainer.nccl import NcclRefusedError
from multiring.errors import ArgumentError, UnsupportedError
from multiring.frontend import lifecycle
from multiring.frontend.process_sets import ProcessSet, global_process_set

__all__ = ["Communicator", "CommunicatorBase", "create_communicator"]

_SERVED = ("flat", "naive", "non_cuda_aware")  # all the same: the planner decides how bytes go
_BY_NCCL = ("pure_nccl", "hierarchical", "two_dimensional", "single_node")


def create_communicator(
    communicator_name: str = "flat",
    mpi_comm: Any = None,
    *,
    process_set: ProcessSet = global_process_set,
    **kwargs: Any,
) -> Communicator:
    """Return a communicator of the ranks of `process_set`, having joined the job where that was not done.

    Args:
        communicator_name: "flat", "naive" or "non_cuda_aware"; they are the same.
        mpi_comm: only None.
        process_set: by default all ranks.
        kwargs: allreduce_grad_dtype: numpy.float16 for float32 gradients that travel between hosts as float16;
            batched_copy: kept for `get_config`, and not used.

    Raises:
        UnsupportedError: a communicator that needs NCCL, or does not communicate; an MPI communicator.
        ArgumentError: no such communicator or option.
    """
    if communicator_name in _BY_NCCL:
        raise NcclRefusedError(
            f"create_communicator({communicator_name!r}) needs NCCL and GPUs, and multiring moves host memory: "
            "write create_communicator('flat')"
        )
    if communicator_name == "dummy":
        raise UnsupportedError(
            "create_communicator('dummy') communicates nothing, so that the ranks' models would diverge: "
            "write create_communicator('flat')"
        )
    if communicator_name not in _SERVED:
        raise ArgumentError(f"Unrecognized communicator: {communicator_name!r}; want one of {', '.join(_SERVED)}")
    if mpi_comm is not None:
        raise UnsupportedError(
            f"create_communicator(mpi_comm={mpi_comm!r}): multiring's ranks meet without MPI; want process_set="
            "ProcessSet([...]), or `split` of a communicator of all ranks"
        )
    gradient_dtype = kwargs.pop("allreduce_grad_dtype", None)
    batched_copy = kwargs.pop("batched_copy", True)
    if kwargs:
        raise ArgumentError(f"create_communicator: unknown options {sorted(kwargs)}; want allreduce_grad_dtype")
    if not lifecycle.is_initialized():
        lifecycle.init()
    communicator = Communicator(process_set, gradient_dtype)
    communicator.set_config("batched_copy", batched_copy)
    return communicator
