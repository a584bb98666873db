"""create_communicator: make a communicator by ChainerMN's names."""

from typing import Any

from chainermn.communicators import CommunicatorBase

from multiring._frontend import lifecycle
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.chainer.communicator import Communicator
from multiring.chainer.nccl import NcclRefusedError
from multiring.errors import ArgumentError, UnsupportedError

__all__ = ["Communicator", "CommunicatorBase", "create_communicator"]

_SERVED = ("flat", "naive", "non_cuda_aware")  # these are the same, because the planner chooses the algorithm
_BY_NCCL = ("pure_nccl", "hierarchical", "two_dimensional", "single_node")


def create_communicator(
    communicator_name: str = "flat",
    mpi_comm: Any = None,
    *,
    process_set: ProcessSet = global_process_set,
    **kwargs: Any,
) -> Communicator:
    """Return a communicator of the ranks of `process_set`.

    Join the job first if needed.

    Args:
        communicator_name: "flat", "naive" or "non_cuda_aware". All three are the same.
        mpi_comm: must be None.
        process_set: by default, all ranks.
        kwargs: `allreduce_grad_dtype=numpy.float16` sends float32 gradients between hosts as float16. `batched_copy`
            is only stored for `get_config`.

    Raises:
        UnsupportedError: the communicator needs NCCL or does not communicate, or `mpi_comm` is given.
        ArgumentError: the name or an option is unknown.
    """
    if communicator_name in _BY_NCCL:
        raise NcclRefusedError(
            f"create_communicator({communicator_name!r}) needs NCCL and GPUs, but multiring moves host memory only: "
            "write create_communicator('flat')"
        )
    if communicator_name == "dummy":
        raise UnsupportedError(
            "create_communicator('dummy') does not communicate, so the ranks' models would diverge: "
            "write create_communicator('flat')"
        )
    if communicator_name not in _SERVED:
        raise ArgumentError(f"Unrecognized communicator: {communicator_name!r}; want one of {', '.join(_SERVED)}")
    if mpi_comm is not None:
        raise UnsupportedError(
            f"create_communicator(mpi_comm={mpi_comm!r}): multiring does not use MPI communicators; pass process_set="
            "ProcessSet([...]), or call `split` of a communicator of all ranks"
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
