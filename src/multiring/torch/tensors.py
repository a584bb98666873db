"""Tensors as the arrays that a Group takes, and arena memory as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring.errors import UnsupportedError
from multiring.runtime import Group


@dataclass(frozen=True, slots=True)
class Shared:
    """A flat piece of the arena, as the Group and as torch see it."""

    array: "np.ndarray[Any, np.dtype[Any]]"
    tensor: Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return what NumPy calls `dtype`."""
    return str(dtype).removeprefix("torch.")


def refuse_elsewhere(tensor: Tensor, name: str) -> None:
    """Raise UnsupportedError unless `tensor` is plain memory of the host.

    Args:
        tensor: any.
        name: what the error calls it.
    """
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"{name} is on {tensor.device}; multiring moves host memory only so far: use .cpu()")
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(f"{name} is {kind}; want a dense tensor")


def allocate(group: Group, count: int, dtype: torch.dtype) -> Shared:
    """Return `count` zeros of `dtype` in the arena.

    Raises:
        ArgumentError: multiring moves no such type, or the rank's segment is full.
    """
    array = group.allocate(count, dtype_name(dtype))
    array.view(np.uint8).fill(0)
    # frombuffer takes no empty buffer, and does not know ml_dtypes' bfloat16.
    tensor = torch.frombuffer(array.view(np.uint8), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return Shared(array, tensor)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return `tensor`'s own strides where it is dense, else those of a dense copy in the same order."""
    return torch.empty_like(tensor, device="meta").stride()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a row-major `tensor`, of any type, as a flat tensor of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def described(tensor: Tensor, strides: Sequence[int] | None = None) -> str:
    """Return the type and shape of `tensor` in words, and `strides` where given."""
    order = "" if strides is None else f" with strides {tuple(strides)}"
    return f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}{order}"
