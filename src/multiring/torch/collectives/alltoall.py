"""alltoall: every rank sends rows to every rank. The signatures are Horovod's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.array_rows import row_counts
from multiring._frontend.handles import Several, fail_call, handle_of
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._frontend.signatures import ALLTOALL
from multiring.errors import ArgumentError
from multiring.torch.collectives.staged import to_device
from multiring.torch.collectives.varying_rows import submit_exchange
from multiring.torch.interop import dtype_name, require_plain, wants_gradient

Splits = Tensor | Sequence[int] | None


def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of `tensor` to each rank, and return the received rows.

    The received rows are in the senders' rank order. The operation is differentiable. Backward returns each row's
    gradient to the sender of the row. Every rank must therefore run the backward pass.

    Args:
        tensor: a tensor of any type; the ranks' shapes may differ in the first dimension only.
        splits: the number of rows for each rank of the set, as 32-bit integers. Rows beyond their sum are not sent.
            Without `splits`, each rank receives an equal part; the number of rows must be a multiple of the number of
            ranks.
        name: as for `allreduce`.
        process_set: the ranks that take part; by default all ranks.

    Returns:
        The received rows; if `splits` is given, a pair of these rows and the number of rows received from each rank.

    Raises:
        ArgumentError: `splits` does not fit, this rank is not in the set, or another operation in progress has this
            name.
        CollectiveError: the ranks' calls differ, a tensor has no dimension, or a rank has failed. Every rank
            raises it.
        UnsupportedError: the tensor is not dense, or neither in host memory nor on a CUDA device.
    """
    require_plain(tensor)
    if wants_gradient(tensor):
        found = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call] # torch's own
    else:
        found = _submit(tensor, splits, name, process_set, waits=True).wait()
    received, received_splits = found
    return received if splits is None else (received, received_splits)


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `alltoall` without a gradient, and return its handle.

    `synchronize` of the handle returns the received rows and the number of rows received from each rank.
    """
    require_plain(tensor)
    return handle_of(_submit(tensor, splits, name, process_set))


def _submit(
    tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet, *, waits: bool = False
) -> Several:
    members = members_of(process_set)
    try:
        sent = _splits(splits, len(tensor), members.size) if tensor.dim() else [0] * members.size
    except ArgumentError as error:
        fail_call(members, name, ALLTOALL, error)
        raise
    pending = submit_exchange(members, tensor, sent, name, waits=waits)
    device = splits.device if isinstance(splits, Tensor) else tensor.device

    def finish(found: list[tuple[Tensor, Sequence[int]]]) -> tuple[Tensor, Tensor]:
        received, rows = found[0]
        counts = torch.tensor(rows, dtype=torch.int32, device="cpu")
        return received, counts if device.type == "cpu" else to_device(members, counts, device)

    return Several([pending], finish)


def _splits(splits: Splits, rows: int, ranks: int) -> list[int]:
    """Return the number of rows for each rank."""
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ArgumentError(
                f"splits are {dtype_name(splits.dtype)} of shape {tuple(splits.shape)}; want int32 of one dimension"
            )
        splits = splits.tolist()
    return row_counts(splits, rows, ranks)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        received, received_splits = _submit(tensor, splits, name, process_set, waits=True).wait()
        ctx.rows, ctx.received_splits, ctx.process_set = len(tensor), received_splits, process_set
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back, _ = _submit(gradients[0], ctx.received_splits.cpu(), None, ctx.process_set, waits=True).wait()
        unsent = ctx.rows - len(back)
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return back, None, None, None
