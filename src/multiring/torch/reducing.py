"""One tensor combined over the ranks, with Horovod's names."""

from typing import Any

import torch
from torch import Tensor

from multiring.errors import UnsupportedError
from multiring.runtime import Group, world
from multiring.torch.tensors import allocate, refuse_elsewhere

_LINEAR = ("average", "sum")


def allreduce(tensor: Tensor, op: str = "average", *, group: Group | None = None) -> Tensor:
    """Return a new tensor: every rank's `tensor` combined.

    Differentiable for "average" and "sum": its gradient is combined likewise, so every rank has to run that backward.

    Args:
        tensor: the same shape and type on all ranks.
        op: "average", "sum", "min", "max" or "product".
        group: by default all ranks.

    Raises:
        ArgumentError: an unknown op or type.
        MismatchError: on every rank: the ranks differ in shape, type or op.
        UnsupportedError: not in host memory, not dense; or it requires a gradient that `op` does not have.
    """
    refuse_elsewhere(tensor, "tensor")
    whole = group or world()
    if tensor.requires_grad and torch.is_grad_enabled():
        if op not in _LINEAR:
            raise UnsupportedError(
                f"allreduce {op!r} of a tensor that requires a gradient; want tensor.detach(), or one of {_LINEAR}"
            )
        reduced: Tensor = _AllReduce.apply(tensor, op, whole)  # type: ignore[no-untyped-call] # torch's own
        return reduced
    return _reduced(tensor, op, whole)


def allreduce_(tensor: Tensor, op: str = "average", *, group: Group | None = None) -> Tensor:
    """Combine every rank's `tensor` into all of them, in place, and return it; otherwise as `allreduce`.

    Raises:
        UnsupportedError: `tensor` requires a gradient, and autograd would not know that it changed.
    """
    refuse_elsewhere(tensor, "tensor")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("allreduce_ of a tensor that requires a gradient; use torch.no_grad(), or allreduce")
    (group or world()).all_reduce(tensor.detach(), op)
    torch.autograd.graph.increment_version(tensor)
    return tensor


def _reduced(tensor: Tensor, op: str, group: Group) -> Tensor:
    memory = allocate(group, tensor.numel(), tensor.dtype)
    memory.tensor.copy_(tensor.detach().reshape(-1))
    group.all_reduce(memory.array.reshape(tensor.shape), op)
    return memory.tensor.view(tensor.shape)


class _AllReduce(torch.autograd.Function):
    """Combining is linear, and the same on all ranks: the gradient of the ranks' losses is combined the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, group: Group) -> Tensor:
        ctx.op, ctx.group = op, group
        return _reduced(tensor, op, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(gradients[0], ctx.op, ctx.group), None, None
