"""Allreduce of sparse tensors: gather the elements of all ranks and add them up.

Each rank's indices and values travel together, as rows of bytes. The call is thus one operation, and it has the name of
a dense allreduce: a rank that passes a dense tensor meets the ranks that pass a sparse one, and all get the mismatch.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.handles import Name, Pending, Prefixed, Submitted, submit
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import LINEAR, Average, Combination, combination, name_of
from multiring._frontend.signatures import (
    ALLREDUCE,
    DATA_TYPE,
    OPERATION,
    REDUCTION,
    SCALES,
    SPARSE_ALLREDUCE,
    SPARSE_DIMENSIONS,
    WHOLE_SHAPE,
    scales_text,
)
from multiring._runtime import Group, Handle
from multiring.errors import ArgumentError
from multiring.torch.collectives.dtype_conversion import scaled
from multiring.torch.collectives.staged import Staged, Staging, to_device
from multiring.torch.interop import (
    bytes_of,
    dtype_name,
    in_one_piece,
    is_sparse,
    refuse_other_devices,
    rows_from,
    rows_of_bytes,
    shown,
)
from multiring.torch.sparse_sums import average_of_entries, sum_of_entries


class SparseHandle:
    """The handle of a sparse allreduce; calling it waits for the operation and returns the result."""

    def __init__(self, pending: Submitted) -> None:
        self._pending = pending

    def __call__(self) -> Tensor:
        """Wait for the operation, and return the sum or average."""
        found: Tensor = self._pending.wait()
        return found


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | str | None, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Start an allreduce of sparse tensors, and return its handle.

    Call the handle to wait for the result. Each rank first adds up its elements that have the same indices. The result
    has each index once.

    Args:
        tensor: a tensor of layout torch.sparse_coo. Its shape and type are the same on all ranks; the number of its
            elements may differ.
        name: as for `allreduce`.
        op: Average or Sum.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: the tensor is not sparse, `op` is neither Average nor Sum, or another operation in progress
            has this name.
    """
    if not is_sparse(tensor):
        raise ArgumentError(f"sparse_allreduce_async of {shown(tensor)}: want a tensor of layout torch.sparse_coo")
    how = combination(op, None, 1.0, 1.0)
    return SparseHandle(submit_sparse(members_of(process_set), tensor, name, how, in_place=False))


def submit_sparse(members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool) -> Submitted:
    """Start an allreduce of sparse tensors; its result is `tensor` itself if `in_place`, else a new tensor."""
    if how.op not in LINEAR:
        raise ArgumentError(f"{name_of(how.op)} of a sparse tensor: want Average or Sum, or tensor.to_dense()")
    if isinstance(name, str):
        name = Prefixed(ALLREDUCE, name)
    if not tensor.is_cpu:
        return _submit_staged(members, tensor, name, how, in_place=in_place)
    return _submit_on_host(members, tensor, name, how, in_place=in_place)


def _submit_staged(members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool) -> Staged:
    """Start an allreduce of a sparse tensor on a device. Its entries are added up on the host."""
    refuse_other_devices(tensor.device, "tensor")
    own = tensor.detach()
    entries = own._indices(), own._values()  # noqa: SLF001 -- as they are: coalescing waits for the device
    staging = Staging(members, SPARSE_ALLREDUCE, name, entries)
    with staging.preparing(entries):
        indices, values = map(staging.copied, entries)

    shape, device, changed = own.shape, tensor.device, tensor if in_place else None

    def start(placed: Name) -> Pending:
        host = torch.sparse_coo_tensor(indices, values, shape, device="cpu", check_invariants=False)
        return _submit_on_host(members, host, placed, how, in_place=False)

    def finish(found: Tensor) -> Tensor:
        places, sums = (to_device(members, each, device) for each in (found.indices(), found.values()))
        result = torch.sparse_coo_tensor(
            places, sums, found.shape, device=device, is_coalesced=True, check_invariants=False
        )
        return result if changed is None else _put(changed, result)

    return staging.submit(start, finish)


def _put(tensor: Tensor, result: Tensor) -> Tensor:
    with torch.no_grad():  # copy into `tensor` itself too: tensor.detach() would not share the new entries
        tensor.copy_(result)
    return tensor


def _submit_on_host(members: Members, tensor: Tensor, name: Name, how: Combination, *, in_place: bool) -> Pending:
    own = tensor.detach().coalesce()
    shape, dtype, dimensions = own.shape, own.dtype, own.sparse_dim()
    rows = _packed(own.indices(), scaled(own.values(), how.prescale))
    signature = (
        (OPERATION, SPARSE_ALLREDUCE),
        (DATA_TYPE, dtype_name(dtype)),
        (WHOLE_SHAPE, str(tuple(shape))),
        (SPARSE_DIMENSIONS, str(dimensions)),
        (REDUCTION, name_of(how.op)),
        (SCALES, scales_text(how.prescale, how.postscale)),
    )

    def start(group: Group, label: str) -> Handle:
        return group.all_gather_async(rows_from(rows), label=label, with_rows=True)

    def finish(found: tuple[Any, Sequence[int]]) -> Tensor:
        gathered = rows_of_bytes(found[0], torch.uint8, rows.shape[1:])
        indices, values = _unpacked(gathered, dimensions, dtype, shape[dimensions:])
        if how.op == Average:
            is_whole = not (dtype.is_floating_point or dtype.is_complex)
            factor = how.postscale if is_whole else 1.0
            places, sums = average_of_entries(indices, values, shape, members.size, factor)
            sums = sums if is_whole else scaled(sums, how.postscale)
        else:
            total = sum_of_entries(indices, values, shape)
            places, sums = total.indices(), scaled(total.values(), how.postscale)
        result = torch.sparse_coo_tensor(places, sums, shape, device="cpu", is_coalesced=True, check_invariants=False)
        return _put(tensor, result) if in_place else result

    return submit(members, name, signature, start, finish)


def _packed(indices: Tensor, values: Tensor) -> Tensor:
    """Return one row of bytes for each entry: its index and its value. Each column of `indices` is an index."""
    count = len(values)
    parts = [
        bytes_of(in_one_piece(part)).view(count, math.prod(part.shape[1:]) * part.element_size())
        for part in (indices.t(), values)
    ]
    return torch.cat(parts, dim=1)


def _unpacked(rows: Tensor, dimensions: int, dtype: torch.dtype, behind: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the indices and the values of such rows. Each row of the indices is an index."""
    count, width = len(rows), dimensions * torch.int64.itemsize
    # Copies, because a part of a single row would begin where no number of its type may.
    indices, values = (
        part.clone(memory_format=torch.contiguous_format).view(-1) for part in (rows[:, :width], rows[:, width:])
    )
    return indices.view(torch.int64).view(count, dimensions), values.view(dtype).view(count, *behind)
