"""Collectives on rows; the number of rows may differ between ranks. Tensors of any type travel as rows of bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from multiring._frontend.errors import RefusedInternalError
from multiring._frontend.handles import Name, Pending, Submitted, submit
from multiring._frontend.process_sets import Members
from multiring._frontend.signatures import ALLGATHER, ALLTOALL, rows_signature
from multiring._runtime import Group, Handle
from multiring.errors import Signature
from multiring.torch.collectives.staged import Staged, Staging, to_device
from multiring.torch.interop import dtype_name, in_one_piece, rows_from, rows_of_bytes


def submit_rows(
    members: Members,
    tensor: Tensor,
    name: Name,
    operation: str = ALLGATHER,
    more: Signature = (),
    *,
    waits: bool = False,
) -> Submitted:
    """Start to gather the rows of all ranks. The result is a tensor of all rows, and the number of rows of each rank.

    With `waits`, the caller must wait for the operation next.
    """
    if not tensor.is_cpu:
        return _staged(
            members, tensor, name, operation, lambda host, placed: submit_rows(members, host, placed, operation, more)
        )
    if not tensor.dim():
        return submit_refusal(members, tensor, name, operation)
    own = in_one_piece(tensor)

    def start(group: Group, label: str) -> Handle:
        return group.all_gather_async(rows_from(own), label=label, with_rows=True, waits=waits)

    def finish(found: tuple[Any, Sequence[int]]) -> tuple[Tensor, Sequence[int]]:
        array, rows = found
        return rows_of_bytes(array, own.dtype, own.shape[1:]), rows

    return submit(members, name, rows_signature(operation, dtype_name(own.dtype), own.shape, more), start, finish)


def submit_exchange(
    members: Members, tensor: Tensor, splits: Sequence[int], name: Name, *, waits: bool = False
) -> Submitted:
    """Start to send each rank its rows of `tensor`.

    `splits` gives the number of rows for each rank. The result is a tensor of the received rows, and the number of
    rows received from each rank.
    """
    if not tensor.is_cpu:
        return _staged(
            members, tensor, name, ALLTOALL, lambda host, placed: submit_exchange(members, host, splits, placed)
        )
    if not tensor.dim():
        return submit_refusal(members, tensor, name, ALLTOALL)
    own = in_one_piece(tensor)
    sent = own.narrow(0, 0, sum(splits))

    def start(group: Group, label: str) -> Handle:
        return group.all_to_all_async(rows_from(sent), splits=splits, label=label, with_rows=True, waits=waits)

    def finish(found: tuple[Any, Sequence[int]]) -> tuple[Tensor, Sequence[int]]:
        array, rows = found
        return rows_of_bytes(array, own.dtype, own.shape[1:]), rows

    return submit(members, name, rows_signature(ALLTOALL, dtype_name(own.dtype), own.shape), start, finish)


def _staged(
    members: Members,
    tensor: Tensor,
    name: Name,
    operation: str,
    submit_host: Callable[[Tensor, Name], Submitted],
) -> Staged:
    """Start an operation of rows that are on a device."""
    staging = Staging(members, operation, name, [tensor])
    with staging.preparing([tensor]):
        host = staging.copied(tensor)

    device = tensor.device

    def finish(found: tuple[Tensor, Sequence[int]]) -> tuple[Tensor, Sequence[int]]:
        gathered, rows = found
        return to_device(members, gathered, device), rows

    return staging.submit(lambda placed: submit_host(host, placed), finish)


def submit_refusal(members: Members, tensor: Tensor, name: Name, operation: str) -> Pending:
    """Start an operation that fails on every rank, because `tensor` has no dimension and therefore no rows.

    The ranks negotiate the operation as usual. They therefore stay in step, and ranks whose tensors have rows get the
    error too.
    """

    def start(group: Group, label: str) -> Handle:
        return group.barrier_async(label=label)

    def finish(_: Any) -> None:
        raise RefusedInternalError(
            f"Rank zero tried to {operation} a rank-zero tensor: {operation} of a tensor of no dimensions; want at "
            "least one, to cut rows from: use tensor.reshape(1)"
        )

    return submit(members, name, rows_signature(operation, dtype_name(tensor.dtype), tensor.shape), start, finish)
