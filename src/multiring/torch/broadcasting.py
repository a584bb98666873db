"""One rank's tensors for all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multiring.errors import ArgumentError
from multiring.runtime import Group, world
from multiring.torch.likeness import require_alike, told_to_others
from multiring.torch.tensors import bytes_of, described, refuse_elsewhere


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int = 0, *, group: Group | None = None
) -> None:
    """Overwrite every rank's tensors with rank `root_rank`'s, in place.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`; the same names, shapes and types on all ranks.
        root_rank: of the group.
        group: by default all ranks.

    Raises:
        ArgumentError: `params` has something that is no tensor, or there is no such rank.
        MismatchError: on every rank: the ranks differ in names, shapes or types.
        UnsupportedError: a tensor is not in host memory, or not dense.
    """
    whole = group or world()
    with told_to_others(whole, "broadcast_parameters"):
        require_rank(whole, root_rank)
        named = list(params.items() if isinstance(params, Mapping) else params)
        for name, tensor in named:
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{name} is a {type(tensor).__name__}; want a tensor")
            refuse_elsewhere(tensor, name)
    lines = [f"root_rank={root_rank}", *(f"{name}, {described(tensor)}" for name, tensor in named)]
    require_alike(whole, "broadcast_parameters", lines)
    broadcast_tensors(whole, [tensor for _, tensor in named], root_rank)


def require_rank(group: Group, root_rank: int) -> None:
    """Raise ArgumentError unless `group` has rank `root_rank`."""
    if not 0 <= root_rank < group.size:
        raise ArgumentError(f"root_rank={root_rank}: want a rank of the group, 0 to {group.size - 1}")


def broadcast_tensors(group: Group, tensors: Sequence[Tensor], root_rank: int) -> None:
    """Overwrite `tensors`, known to be alike on all ranks, with rank `root_rank`'s."""
    with torch.no_grad():
        # Row-major on the wire, as the ranks' strides may differ.
        rows = [tensor.detach().contiguous() for tensor in tensors]
        handles = [group.broadcast_async(bytes_of(row).numpy(), root_rank) for row in rows]
        for tensor, row, handle in zip(tensors, rows, handles, strict=True):
            handle.wait()
            if group.rank == root_rank:
                continue
            if row.data_ptr() != tensor.data_ptr():
                tensor.copy_(row)
            # What autograd saved of it is no longer what it was.
            torch.autograd.graph.increment_version(tensor)
