"""Convert tensors to the arrays that a Group takes, and memory of the arena to tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._runtime import Group
from multiring._runtime.arrays import Buffer, numpy_dtype
from multiring.errors import ArgumentError, UnsupportedError

# Up to this size, ranks of one host exchange data through small shared buffers from any memory: the arena would not be
# faster.
_SMALL_BYTES = 16 << 10
_ROCM: str | None = getattr(torch.version, "hip", None)  # torch for ROCm calls its devices "cuda", too


@dataclass(frozen=True, slots=True)
class Shared:
    """A flat piece of the arena, as an array for the Group and as a tensor for torch."""

    array: "np.ndarray[Any, np.dtype[Any]]"
    tensor: Tensor


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return NumPy's name of `dtype`."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of this NumPy name; the inverse of `dtype_name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def refuse_layout(tensor: Tensor, name: str) -> None:
    """Raise UnsupportedError unless `tensor` is dense; `name` is its name in the error."""
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(f"{name} is {kind}; want a dense tensor")


def refuse_unserved(tensor: Tensor, name: str) -> None:
    """Raise UnsupportedError unless `tensor` is a dense tensor in host memory or on a CUDA device.

    Args:
        tensor: any tensor.
        name: the tensor's name in the error.
    """
    if tensor.device.type == "cuda" and tensor.layout == torch.strided and _ROCM is None:
        return
    if tensor.is_meta:
        raise UnsupportedError(f"{name} is on meta and has no values yet: use to_empty(device='cpu'), and load some")
    if not tensor.is_cpu:
        refuse_other_devices(tensor.device, name)
    refuse_layout(tensor, name)


def refuse_other_devices(device: torch.device, name: str) -> None:
    """Raise UnsupportedError unless `device` is a CUDA device.

    Args:
        device: any device that is not the host.
        name: what is on the device, for the error.
    """
    if device.type == "cuda" and _ROCM is None:
        return
    build = "" if device.type != "cuda" else f" of torch for ROCm {_ROCM}"
    raise UnsupportedError(
        f"{name} is on {device}{build}; multiring serves host memory and CUDA devices only: use .cpu()"
    )


def require_plain(tensor: Any) -> None:
    """Check that `tensor` is a dense tensor in host memory or on a CUDA device.

    Raises:
        ArgumentError: `tensor` is not a tensor.
        UnsupportedError: `tensor` is not dense, or on another device.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"tensor is a {type(tensor).__name__}; want a torch.Tensor")
    refuse_unserved(tensor, "tensor")


def is_sparse(tensor: Any) -> bool:
    """Return whether `tensor`, which may be any object, is a sparse tensor for `sparse_allreduce_async`."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.sparse_coo


def wants_gradient(*tensors: Any) -> bool:
    """Return whether autograd must record an operation on `tensors`; they may be any objects."""
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors)


def allocate(group: Group, count: int, dtype: torch.dtype) -> Shared:
    """Return `count` zeros of `dtype` in the arena.

    Raises:
        ArgumentError: multiring does not support the type, or the rank's segment is full.
    """
    array = group.allocate(count, dtype_name(dtype))
    array.view(np.uint8).fill(0)
    return Shared(array, tensor_of(array, dtype))


def tensor_of(
    array: "np.ndarray[Any, np.dtype[Any]]", dtype: torch.dtype, shape: Sequence[int] | None = None
) -> Tensor:
    """Return a row-major array of the arena as a tensor of `dtype`, in the array's shape or in `shape`.

    The tensor is not a view of another tensor. If an autograd Function returned a view, autograd would forbid changes
    of it in place.
    """
    wanted = array.shape if shape is None else shape
    if not array.size:
        return torch.empty(wanted, dtype=dtype, device="cpu")
    # frombuffer rejects empty buffers and ml_dtypes' bfloat16.
    memory = array.reshape(-1).view(np.uint8)
    if len(wanted) == 1:  # a fast path, which fully_shard needs many times a step
        return torch.frombuffer(memory, dtype=dtype, count=wanted[0])
    return at_place(torch.frombuffer(memory, dtype=torch.uint8), dtype, 0, wanted)


def at_place(memory: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor in the memory of `memory` that is not a view; `offset` is in elements of `dtype`."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    placed: Tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(
        memory.untyped_storage(), offset, shape, strides
    )
    return placed


def new_memory(group: Group, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a row-major tensor of undefined contents; a large one is in the arena."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes <= _SMALL_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return tensor_of(group.allocate(size_bytes, np.uint8), dtype, shape)


def buffer_from(tensor: Tensor) -> Buffer:
    """Return the memory of a row-major `tensor` as a Group's buffer, without a copy; a Group must support its type."""
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), tensor)


def array_of(tensor: Tensor) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return a row-major `tensor` as a NumPy array, without a copy; a Group must support its type."""
    if tensor.dtype is torch.bfloat16:  # torch cannot convert bfloat16 to NumPy
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def rows_from(tensor: Tensor) -> Buffer:
    """Return a row-major `tensor` of any type, with at least one dimension, as a buffer of rows of bytes."""
    width = math.prod(tensor.shape[1:]) * tensor.element_size()
    return Buffer(tensor.data_ptr(), (tensor.shape[0], width), (width, 1), "uint8", tensor)


def rows_of_bytes(array: "np.ndarray[Any, np.dtype[Any]]", dtype: torch.dtype, behind: Sequence[int]) -> Tensor:
    """Return rows of bytes in the arena as a tensor of `dtype`; each row has the shape `behind`."""
    return tensor_of(array, dtype, (array.shape[0], *behind))


def is_one_piece(tensor: Tensor) -> bool:
    """Return whether `tensor` is row-major in memory, without a lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return `tensor` detached if it is row-major in memory, else a row-major copy."""
    found = tensor.detach()
    return found if is_one_piece(found) else found.resolve_conj().resolve_neg().contiguous()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors have the same elements, in the same order, in the same memory.

    Comparing the objects is not enough: `x.data = ...`, `x.set_(...)` and `x.share_memory_()` give an object other
    memory, and two objects may share memory.
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
    """Return whether elements of a dense tensor share memory, as in an expanded tensor or in overlapping windows."""
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
    # Strides may interleave without overlapping. Count the occupied elements to find out.
    extent = 1 + sum((size - 1) * stride for stride, size in dims)
    taken = torch.zeros(extent, dtype=torch.bool, device="cpu")
    taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(taken.count_nonzero()) < tensor.numel()


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses where the memory of a dense `tensor` begins and ends; gaps may hold other tensors."""
    if not tensor.numel():
        return 0, 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def touches(one: Tensor, other: Tensor) -> bool:
    """Return whether the memory of two dense tensors may overlap."""
    first, last = extent_of(one)
    start, end = extent_of(other)
    return first < end and start < last


def apart(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory as a dense `tensor`, with a separate storage object.

    A change of the result's storage, as by `share_memory_()`, does not affect `tensor`. The result keeps the memory
    alive. On a device, the result has the storage of `tensor`: only then does its `record_stream` have an effect.
    """
    if tensor.device.type != "cpu":
        own = tensor.detach()
        placed: Tensor = torch.empty(0, dtype=own.dtype, device=own.device).set_(
            own.untyped_storage(), own.storage_offset(), own.shape, own.stride()
        )
        return placed
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    storage = torch.frombuffer(flat.numpy(), dtype=torch.uint8).untyped_storage()
    found: Tensor = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, tensor.shape, tensor.stride())
    return found


def note_change(tensor: Tensor) -> None:
    """Tell autograd that `tensor` was changed in place, so that values it saved before are invalid."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def shown(value: Any) -> str:
    """Return a description of any value for an error: type and shape of a tensor, or the name of its class."""
    return described(value) if isinstance(value, Tensor) else type(value).__name__


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that many tensors were changed in place; see `note_change`."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (RuntimeError, TypeError):  # inference tensors, or a torch version that takes one tensor at a time
        for tensor in tensors:
            note_change(tensor)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return `tensor`'s strides if it has no gaps, else the strides of a copy without gaps in the same order."""
    return torch.empty_like(tensor, device="meta").stride()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a row-major `tensor` of any type as a flat tensor of bytes."""
    # A tensor of one row or one element may have any strides, with which torch gives no view of another type.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def placed(tensor: Tensor) -> str:
    """Return a text with the type, shape and kind of device of `tensor`, on which ranks must agree."""
    return described(tensor) if tensor.is_cpu else f"{described(tensor)} on {tensor.device.type}"


def described(tensor: Tensor, strides: Sequence[int] | None = None) -> str:
    """Return a text with the type and shape of `tensor`, and with `strides` if given."""
    order = "" if strides is None else f" with strides {tuple(strides)}"
    return f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}{order}"
