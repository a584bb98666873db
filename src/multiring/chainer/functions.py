"""Differentiable communication: ChainerMN's functions, and `allreduce`.

ChainerMN's functions work with any communicator.
"""

from typing import Any

import chainer
from chainermn.functions import allgather, alltoall, bcast, gather, pseudo_connect, recv, scatter, send

from multiring.errors import ArgumentError

__all__ = ["allgather", "allreduce", "alltoall", "bcast", "gather", "pseudo_connect", "recv", "scatter", "send"]


class _AllReduce(chainer.FunctionNode):  # type: ignore[misc] # Chainer has no types
    def __init__(self, communicator: Any, op: str) -> None:
        super().__init__()
        self._communicator = communicator
        self._op = op

    def forward(self, inputs: Any) -> Any:
        return (self._communicator.allreduce(inputs[0], op=self._op),)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        del indexes
        return (allreduce(self._communicator, gradients[0], self._op),)


def allreduce(comm: Any, x: Any, op: str = "sum") -> Any:
    """Return the sum or average of all ranks' `x`.

    The gradient is the same combination of all ranks' gradients.

    Args:
        comm: a communicator from `create_communicator`.
        x: a variable or an array, of the same shape and type on all ranks.
        op: "sum" or "average".

    Raises:
        ArgumentError: `op` is another operation.
    """
    if op not in {"sum", "average"}:
        raise ArgumentError(f"allreduce by op={op!r}: want 'sum' or 'average', which have gradients")
    return _AllReduce(comm, op).apply((x,))[0]
