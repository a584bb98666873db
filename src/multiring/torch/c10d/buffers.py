"""Memory of tensors for operations, and contiguous copies of tensors that are not contiguous."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiring._runtime import Group
from multiring._runtime.arrays import Buffer
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.interop import dtype_name, is_one_piece, new_memory, overlaps_itself


class ElsewhereError(RefusedError):
    """A tensor is in the memory of another device than the host."""

    def __init__(self, what: str, device: torch.device) -> None:
        """Create the error of operation `what` for a tensor on `device`."""
        super().__init__(
            f"{what}: a tensor is on {device}. No backend type associated with device type {device.type}: use .cpu(), "
            'or name a backend for it, as in "cpu:multiring,cuda:multiring"'
        )
        self.device = device


def require_host(what: str, tensor: object, *, is_dense: bool = True) -> None:
    """Raise an error unless `tensor` is a tensor in host memory, and dense if `is_dense`.

    Args:
        what: the operation, for the error.
        tensor: the operation's argument.
        is_dense: whether the tensor must be dense.

    Raises:
        TypeError: `tensor` is not a tensor.
        ElsewhereError: the tensor is in another device's memory.
        RefusedError: the tensor is sparse, and `is_dense` is set.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: got a {type(tensor).__name__}; want a torch.Tensor")
    if not tensor.is_cpu:
        raise ElsewhereError(what, tensor.device)
    if is_dense and tensor.layout is not torch.strided:
        raise RefusedError(f"{what}: a tensor is {str(tensor.layout).removeprefix('torch.')}; want a dense one")


def flat(tensor: Tensor) -> Buffer:
    """Return the memory of a contiguous tensor as a flat buffer of its elements."""
    return Buffer(tensor.data_ptr(), (tensor.numel(),), (1,), dtype_name(tensor.dtype), tensor)


def as_bytes(tensor: Tensor) -> Buffer:
    """Return the memory of a contiguous tensor of any type as a buffer of bytes."""
    return Buffer(tensor.data_ptr(), (tensor.numel() * tensor.element_size(),), (1,), "uint8", tensor)


def contents(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is contiguous, else a contiguous copy."""
    if is_one_piece(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def place_for(group: Group, tensor: Tensor, *, apart: bool = False) -> tuple[Tensor, Callable[[], None] | None]:
    """Return contiguous memory for the result of an operation that overwrites `tensor`.

    Args:
        group: the ranks, which may share the memory.
        tensor: a tensor of any strides.
        apart: whether the memory must be separate from the memory of `tensor`.

    Returns:
        The memory, and a function that copies the result to `tensor`; None instead of the function if the memory is
        the tensor's own.

    Raises:
        RefusedError: several elements of `tensor` share a memory address, as in an expanded tensor.
    """
    if is_one_piece(tensor) and not apart:
        return tensor, None
    require_places(tensor)
    place = new_memory(group, tensor.shape, tensor.dtype)
    return place, lambda: put(tensor, place)


def require_places(*tensors: Tensor) -> None:
    """Raise RefusedError if elements of a tensor that an operation overwrites share a memory address."""
    for tensor in tensors:
        if overlaps_itself(tensor):
            raise RefusedError(
                f"an output tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several elements "
                "at one memory address, as an expanded tensor has; want a separate address for each: use .contiguous()"
            )


def put(tensor: Tensor, found: Tensor) -> None:
    """Copy `found` into `tensor`; both have the same number of elements."""
    with torch.no_grad():
        tensor.detach().copy_(found.view(tensor.shape))


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return `tensors` as one flat tensor if they are contiguous and adjacent in memory, else None."""
    first = tensors[0]
    start = end = first.data_ptr()
    for each in tensors:
        if each.data_ptr() != end or not is_one_piece(each):
            return None
        end += each.numel() * each.element_size()
    storage = first.untyped_storage()
    # Neighbours in memory may still belong to different allocations.
    if start == 0 or end > storage.data_ptr() + storage.nbytes():
        return None
    count = (end - start) // first.element_size()
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, first.storage_offset(), (count,), (1,))


def put_in_all(tensors: Sequence[Tensor], found: Tensor) -> None:
    """Copy `found` into each of `tensors`."""
    for each in tensors:
        put(each, found)


def put_in_order(tensors: Sequence[Tensor], found: Tensor) -> None:
    """Copy consecutive pieces of the flat tensor `found` into `tensors`."""
    at = 0
    for each in tensors:
        put(each, found[at : at + each.numel()])
        at += each.numel()


def touching(calls: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[bool]:
    """Return for each operation whether its memory may overlap the memory of another operation.

    Overlaps of memory that the operations only read do not count.

    Args:
        calls: for each operation, the tensors that it overwrites, and the tensors that it reads.
    """
    pieces = sorted(
        (*_extent(tensor), number, is_overwritten)
        for number, tensors in enumerate(calls)
        for is_overwritten, several in ((True, tensors[0]), (False, tensors[1]))
        for tensor in several
        if tensor.numel()
    )
    found = [False] * len(calls)
    row: list[int] = []  # the operations of a run of overlapping pieces
    end, overwrites = 0, False

    def settle_row() -> None:
        if overwrites and len(set(row)) > 1:
            for number in row:
                found[number] = True

    for first, last, number, is_overwritten in pieces:
        if first >= end:
            settle_row()
            row, overwrites = [], False
        row.append(number)
        end, overwrites = max(end, last), overwrites or is_overwritten
    settle_row()
    return found


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the start and end address of a tensor that is not empty; gaps may hold other tensors' memory."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def bytes_in(one: Buffer, other: Buffer) -> bool:
    """Return whether two pieces of memory overlap."""
    return one.address < other.address + other.size_bytes and other.address < one.address + one.size_bytes
