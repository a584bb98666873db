"""Tensors as the memory that operations work on, and copies of those that are not in one piece."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiring.runtime import Group
from multiring.runtime.arrays import Buffer
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.interop import dtype_name, is_one_piece, new_memory, overlaps_itself


class ElsewhereError(RefusedError):
    """A tensor is in the memory of another device than the host."""

    def __init__(self, what: str, device: torch.device) -> None:
        """Say that `what` got a tensor on `device`."""
        super().__init__(
            f"{what}: a tensor is on {device}. No backend type associated with device type {device.type}: multiring "
            f'moves host memory only; use .cpu(), or name a backend for it, as in "cpu:multiring,cuda:nccl"'
        )
        self.device = device


def require_host(what: str, tensor: object, *, is_dense: bool = True) -> None:
    """Raise unless `tensor` is a tensor in host memory, and a dense one where that is wanted.

    Args:
        what: the operation, for the error.
        tensor: what it was given.
        is_dense: whether that is wanted.

    Raises:
        TypeError: no tensor.
        ElsewhereError: in another device's memory.
        RefusedError: sparse.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: got a {type(tensor).__name__}; want a torch.Tensor")
    if not tensor.is_cpu:
        raise ElsewhereError(what, tensor.device)
    if is_dense and tensor.layout is not torch.strided:
        raise RefusedError(f"{what}: a tensor is {str(tensor.layout).removeprefix('torch.')}; want a dense one")


def flat(tensor: Tensor) -> Buffer:
    """Return the elements of a tensor in one piece, in a row."""
    return Buffer(tensor.data_ptr(), (tensor.numel(),), (1,), dtype_name(tensor.dtype), tensor)


def as_bytes(tensor: Tensor) -> Buffer:
    """Return the memory of a tensor in one piece, of any type, as bytes."""
    return Buffer(tensor.data_ptr(), (tensor.numel() * tensor.element_size(),), (1,), "uint8", tensor)


def contents(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy of it in one piece."""
    if is_one_piece(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def place_for(group: Group, tensor: Tensor, *, apart: bool = False) -> tuple[Tensor, Callable[[], None] | None]:
    """Return memory in one piece for what is to be in `tensor`, and what puts it there; None: it is there already.

    Args:
        group: the ranks, which may share that memory.
        tensor: of any strides.
        apart: whether nothing may be written into the memory of `tensor` before it is put there.

    Raises:
        RefusedError: several elements of `tensor` are one in memory, as of an expanded one: there is no place for each.
    """
    if is_one_piece(tensor) and not apart:
        return tensor, None
    require_places(tensor)
    place = new_memory(group, tensor.shape, tensor.dtype)
    return place, lambda: put(tensor, place)


def require_places(*tensors: Tensor) -> None:
    """Raise RefusedError where several elements of one of `tensors`, which are to be overwritten, are one in memory."""
    for tensor in tensors:
        if overlaps_itself(tensor):
            raise RefusedError(
                f"several elements of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which is "
                "to be overwritten, are one in memory, as of an expanded one; want a place for each: use .contiguous()"
            )


def put(tensor: Tensor, found: Tensor) -> None:
    """Copy `found`, of as many elements, into `tensor`."""
    with torch.no_grad():
        tensor.detach().copy_(found.view(tensor.shape))


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the memory of `tensors` as one flat tensor, where each is in one piece and begins where the last ends."""
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
    return torch.empty(0, dtype=first.dtype).set_(storage, first.storage_offset(), (count,), (1,))


def put_in_all(tensors: Sequence[Tensor], found: Tensor) -> None:
    """Copy `found` into each of `tensors`."""
    for each in tensors:
        put(each, found)


def put_in_order(tensors: Sequence[Tensor], found: Tensor) -> None:
    """Copy `found`, flat, into `tensors`, one after the other."""
    at = 0
    for each in tensors:
        put(each, found[at : at + each.numel()])
        at += each.numel()


def touching(calls: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[bool]:
    """Return, for each of several operations, whether what one of them overwrites may be memory of another's, too.

    Args:
        calls: of each operation, the tensors that it overwrites, and those that it reads.
    """
    pieces = sorted(
        (*_extent(tensor), number, is_overwritten)
        for number, tensors in enumerate(calls)
        for is_overwritten, several in ((True, tensors[0]), (False, tensors[1]))
        for tensor in several
        if tensor.numel()
    )
    found = [False] * len(calls)
    row: list[int] = []  # the operations of pieces that touch, from one to the next
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
    """Return where the memory of `tensor`, which has elements, begins and ends; others' may lie in between."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def bytes_in(one: Buffer, other: Buffer) -> bool:
    """Return whether two pieces of memory have any byte in common."""
    return one.address < other.address + other.size_bytes and other.address < one.address + one.size_bytes
