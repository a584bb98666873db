"""ChainerMN's links, which work with any communicator."""

from typing import Any

from chainermn.functions import batch_normalization
from chainermn.links import (
    MultiNodeBatchNormalization,
    MultiNodeChainList,
    create_mnbn_model,
    create_multi_node_n_step_rnn,
)

from multiring.chainer.communicator import Communicator
from multiring.chainer.nccl import NcclRefusedError

__all__ = ["MultiNodeBatchNormalization", "MultiNodeChainList", "create_mnbn_model", "create_multi_node_n_step_rnn"]

_THEIRS = batch_normalization.get_communication_backend


def _backend_of(comm: Any, communication_backend: str = "auto") -> Any:
    """Return the backend of a batch normalization. In ChainerMN, "mpi" means the communicator's own collectives."""
    if not isinstance(comm, Communicator):
        return _THEIRS(comm, communication_backend)
    if communication_backend not in {"mpi", "nccl", "auto"}:
        raise ValueError(f"MultiNodeBatchNormalization does not support {communication_backend}.")
    if communication_backend == "nccl":
        raise NcclRefusedError("communication_backend='nccl': multiring moves host memory only; want 'auto' or 'mpi'")
    return "mpi"


# ChainerMN's function imports mpi4py to check the communicator's class, but multiring does not need mpi4py. Chainer
# 7.8.1 is the last release, so the replaced function will not change.
batch_normalization.get_communication_backend = _backend_of
