"""Tensors as the arrays that a Group takes, and arena memory as tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring.errors import ArgumentError, UnsupportedError
from multiring.runtime import Group
from multiring.runtime.arrays import Buffer, numpy_dtype

# Up to here ranks of one host exchange what they have in slots, wherever it lies: the arena would win nothing.
_SMALL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Shared:
    """A flat piece of the arena, as the Group and as torch see it."""

    array: "np.ndarray[Any, np.dtype[Any]]"
    tensor: Tensor


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return what NumPy calls `dtype`."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return the type that `dtype_name` calls `name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def refuse_elsewhere(tensor: Tensor, name: str) -> None:
    """Raise UnsupportedError unless `tensor` is plain memory of the host.

    Args:
        tensor: any.
        name: what the error calls it.
    """
    if tensor.device.type != "cpu":
        remedy = "it has no values yet: use to_empty(device='cpu'), and load some" if tensor.is_meta else "use .cpu()"
        raise UnsupportedError(f"{name} is on {tensor.device}; multiring moves host memory only so far: {remedy}")
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(f"{name} is {kind}; want a dense tensor")


def require_plain(tensor: Any) -> None:
    """Raise ArgumentError unless `tensor` is a tensor, and UnsupportedError unless it is plain memory of the host."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"tensor is a {type(tensor).__name__}; want a torch.Tensor")
    refuse_elsewhere(tensor, "tensor")


def is_sparse(tensor: Any) -> bool:
    """Return whether `tensor`, which may be anything, is a sparse tensor as `sparse_allreduce_async` takes it."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.sparse_coo


def wants_gradient(*tensors: Any) -> bool:
    """Return whether autograd is to know what becomes of any of `tensors`, which may be anything."""
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors)


def allocate(group: Group, count: int, dtype: torch.dtype) -> Shared:
    """Return `count` zeros of `dtype` in the arena.

    Raises:
        ArgumentError: multiring moves no such type, or the rank's segment is full.
    """
    array = group.allocate(count, dtype_name(dtype))
    array.view(np.uint8).fill(0)
    return Shared(array, tensor_of(array, dtype))


def tensor_of(
    array: "np.ndarray[Any, np.dtype[Any]]", dtype: torch.dtype, shape: Sequence[int] | None = None
) -> Tensor:
    """Return a row-major array of the arena as torch sees it: of `dtype`, in the array's shape or another.

    It is no view of another tensor, which autograd would not let anybody change that gets it from a Function.
    """
    wanted = array.shape if shape is None else shape
    if not array.size:
        return torch.empty(wanted, dtype=dtype)
    # frombuffer takes no empty buffer, and does not know ml_dtypes' bfloat16.
    memory = array.reshape(-1).view(np.uint8)
    if len(wanted) == 1:  # as fully_shard wants it, many times a step
        return torch.frombuffer(memory, dtype=dtype, count=wanted[0])
    return at_place(torch.frombuffer(memory, dtype=torch.uint8), dtype, 0, wanted)


def at_place(memory: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor in the memory of another, without being its view; `offset` is in elements of `dtype`."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    placed: Tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, strides)
    return placed


def new_memory(group: Group, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a row-major tensor of undefined contents, in the arena where it is large."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes <= _SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    return tensor_of(group.allocate(size_bytes, np.uint8), dtype, shape)


def buffer_from(tensor: Tensor) -> Buffer:
    """Return the memory of a row-major `tensor`, of a type that a Group combines, for a Group; nothing is copied."""
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), tensor)


def array_of(tensor: Tensor) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return a row-major `tensor`, of a type that a Group combines, as NumPy sees it; nothing is copied."""
    if tensor.dtype is torch.bfloat16:  # which torch does not hand to NumPy
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def rows_from(tensor: Tensor) -> Buffer:
    """Return the memory of a row-major `tensor` of any type as rows of bytes; it has at least one dimension."""
    width = math.prod(tensor.shape[1:]) * tensor.element_size()
    return Buffer(tensor.data_ptr(), (tensor.shape[0], width), (width, 1), "uint8", tensor)


def rows_of_bytes(array: "np.ndarray[Any, np.dtype[Any]]", dtype: torch.dtype, behind: Sequence[int]) -> Tensor:
    """Return rows of bytes from the arena as rows of shape `behind` of `dtype`."""
    return tensor_of(array, dtype, (array.shape[0], *behind))


def is_one_piece(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor`, read row by row, has its elements as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy of it, detached, whose memory has its elements as they are, row by row."""
    found = tensor.detach()
    return found if is_one_piece(found) else found.resolve_conj().resolve_neg().contiguous()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether the two dense tensors have the same elements, in the same order, in the same memory.

    That they are one object says nothing: `x.data = ...`, `x.set_(...)` and `x.share_memory_()` give an object other
    memory, and another object may be of the same memory.
    """
    return (
        one.layout is other.layout is torch.strided
        and one.data_ptr() == other.data_ptr()
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements of a dense tensor are one in memory, as of an expanded one, or of windows."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if not tensor.numel() or tensor.is_contiguous():
        return False
    reached = 0
    for stride, size in dims:
        if stride <= reached:
            break
        reached += (size - 1) * stride
    else:
        return False
    # Strides may interleave without meeting: then only counting tells.
    extent = 1 + sum((size - 1) * stride for stride, size in dims)
    taken = torch.zeros(extent, dtype=torch.bool)
    taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(taken.count_nonzero()) < tensor.numel()


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return where the memory of a dense `tensor` begins and ends; other tensors may lie in between."""
    if not tensor.numel():
        return 0, 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def touches(one: Tensor, other: Tensor) -> bool:
    """Return whether the two dense tensors may have memory in common."""
    first, last = extent_of(one)
    start, end = extent_of(other)
    return first < end and start < last


def apart(tensor: Tensor) -> Tensor:
    """Return the memory of a dense `tensor` as one whose storage is its own.

    Whoever gives the result other memory, as `share_memory_()` does to all tensors of a storage, leaves `tensor` as it
    is. The result keeps the memory.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    storage = torch.frombuffer(flat.numpy(), dtype=torch.uint8).untyped_storage()
    found: Tensor = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
    return found


def note_change(tensor: Tensor) -> None:
    """Tell autograd that what it saved of `tensor` is no longer what it was."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def shown(value: Any) -> str:
    """Return what `value`, which may be anything, is in words."""
    return described(value) if isinstance(value, Tensor) else type(value).__name__


def note_changes(tensors: Sequence[Tensor]) -> None:
    """As `note_change`, of many tensors at once."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (RuntimeError, TypeError):  # of inference mode; or a torch that takes one at a time
        for tensor in tensors:
            note_change(tensor)


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
