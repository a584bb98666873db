"""What the optimizers of this room do alike: find gradients, take norms, begin buffers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.interop import described


def with_gradients(optimizer: str, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of `group` that have a gradient, and those.

    Raises:
        UnsupportedError: a gradient is sparse.
    """
    parameters = [each for each in group["params"] if each.grad is not None]
    for each in parameters:
        if each.grad.layout != torch.strided:
            raise UnsupportedError(
                f"{optimizer}: the gradient of a parameter, {described(each)}, is sparse; want a dense one, as of "
                "Embedding(sparse=False)"
            )
    return parameters, [each.grad for each in parameters]


def as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `tensors` in which a complex number is two real ones, as torch's own Adam sees it."""
    return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]


def norms_of(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return |each|; shape (tensors,)."""
    if not tensors:
        return np.empty(0)
    found: NDArray[np.float64] = torch.stack(torch._foreach_norm(list(tensors))).double().numpy()  # noqa: SLF001 -- torch's name
    return found


def buffers_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return what the optimizer keeps as `name` for each parameter; zeros where it begins."""
    for each in parameters:
        state = optimizer.state[each]
        if name not in state:
            state[name] = torch.zeros_like(each, memory_format=torch.preserve_format)
    return [optimizer.state[each][name] for each in parameters]


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return what `closure` does, with gradients; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def number(value: Any) -> float:
    """Return a learning rate, which torch lets be a tensor of one element."""
    return float(value)


def require_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError where a group's trust_ratio is no bool."""
    for group in optimizer.param_groups:
        if not isinstance(group["trust_ratio"], bool):
            raise ArgumentError(f"trust_ratio={group['trust_ratio']!r} of a parameter group: want True or False")
