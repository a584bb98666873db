"""Helpers of the optimizers and stages: find gradients, compute norms, create optimizer state."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.interop import described
from multiring.torch.parallelizing.held import PartGradient, held_of, is_dtensor, locals_of, summed_over_parts


def with_gradients(optimizer: str, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of `group` that have a gradient, and their gradients.

    Raises:
        UnsupportedError: a gradient is sparse.
    """
    parameters = [each for each in group["params"] if each.grad is not None]
    for each in parameters:
        if each.grad.layout != torch.strided:
            raise UnsupportedError(
                f"{optimizer}: the gradient of a parameter, {described(each)}, is sparse; want a dense gradient, as "
                "from Embedding(sparse=False)"
            )
    return parameters, [each.grad for each in parameters]


def as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `tensors` in which a complex number is two real numbers, as in torch's own Adam."""
    return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]


def norms_of(tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> NDArray[np.float64]:
    """Return the norm of each tensor, in an array of shape (tensors,).

    For DTensors, every rank that holds a part must call this function. For tensors of a device, the call waits until
    the device has computed the norms.

    Args:
        tensors: plain tensors, or DTensors.
        like: DTensors, if `tensors` are this rank's parts of them.
    """
    if not tensors:
        return np.empty(0)
    whole = tensors if like is None else like
    own = plain(tensors)
    if len({each.device for each in own}) > 1:  # torch's operations on lists are fast on one device only
        by_tensor = on_host([each.norm() for each in own])
    else:
        by_tensor = list(torch._foreach_norm(own))  # noqa: SLF001 -- torch's name
    norms = torch.stack(by_tensor).double()
    if any(map(is_dtensor, whole)):
        norms = summed_over_parts(norms.square(), whole).sqrt()
    found: NDArray[np.float64] = on_host([norms])[0].numpy()
    return found


def square_of(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    """Return the squared norm of all `gradients` together; in a pipeline, of the gradients of all stages.

    Every rank must call this function.

    Args:
        parameters: some parameters of the model, which show how the model is divided among the ranks.
        gradients: this rank's gradients.
    """
    found = float((norms_of(gradients) ** 2).sum())
    held = held_of(parameters)
    if held is None or held.stages is None:
        return found
    told = torch.tensor(found, dtype=torch.float64, device="cpu")
    dist.all_reduce(told, group=held.stages)
    return float(told)


def norm_on_device(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the norm of all `gradients` together without waiting for their device.

    The result is None if the gradients are in host memory, on several devices, sparse, or divided among ranks.
    """
    devices = {each.device for each in gradients}
    if len(devices) != 1 or devices == {torch.device("cpu")} or held_of(parameters) is not None:
        return None
    if any(is_dtensor(each) or each.layout != torch.strided for each in gradients):
        return None
    norms = torch._foreach_norm(plain(gradients))  # noqa: SLF001 -- torch's name
    return torch.stack(list(norms)).double().square().sum().sqrt()


def are_finite(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Return whether all `gradients` are finite on all ranks that hold a part; each such rank must call this."""
    # Check each tensor's norm: the sum of their squares may overflow.
    is_bad = not np.isfinite(norms_of(gradients)).all()
    held = held_of(parameters)
    if held is None or held.stages is None:
        return not is_bad
    told = torch.tensor(float(is_bad), device="cpu")
    dist.all_reduce(told, dist.ReduceOp.MAX, group=held.stages)
    return not told


def plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor as a plain Tensor, for torch's operations on lists of tensors."""
    return [each.as_subclass(Tensor) if isinstance(each, PartGradient) else each for each in locals_of(tensors)]


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Return each tensor times `factor`, a number or a tensor of one number; a DTensor gives a DTensor."""
    if isinstance(factor, Tensor) or len({each.device for each in tensors}) > 1:
        return [(each * factor).to(each.dtype) for each in tensors]  # a tensor of one number keeps its type
    if any(map(is_dtensor, tensors)):
        return [each * factor for each in tensors]
    return list(torch._foreach_mul(plain(tensors), factor))  # noqa: SLF001 -- torch's name


def buffers_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return the optimizer's state `name` of each parameter; create missing ones as zeros."""
    for each in parameters:
        state = optimizer.state[each]
        if name not in state:
            state[name] = torch.zeros_like(each, memory_format=torch.preserve_format)
    return [optimizer.state[each][name] for each in parameters]


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call `closure` with gradients enabled, and return its result; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def number(value: Any) -> float:
    """Return a learning rate as a float; torch also allows a tensor of one element."""
    return float(value)


def require_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if a group's `trust_ratio` is not a bool."""
    for group in optimizer.param_groups:
        if not isinstance(group["trust_ratio"], bool):
            raise ArgumentError(f"trust_ratio={group['trust_ratio']!r} of a parameter group: want True or False")
