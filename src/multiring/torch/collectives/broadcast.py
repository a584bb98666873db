"""broadcast: one rank's tensor for all ranks. The signatures are Horovod's."""

from typing import Any

import torch
from torch import Tensor

from multiring.frontend.handles import Pending, handle_of, submit
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of, world_rank_in
from multiring.frontend.reduce_ops import Average
from multiring.frontend.signatures import BROADCAST, ROOT, plain_signature
from multiring.runtime import Group, Handle
from multiring.runtime.arrays import Buffer
from multiring.torch.collectives.allreduce import allreduce
from multiring.torch.interop import dtype_name, is_one_piece, new_memory, note_change, require_plain, wants_gradient


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return rank `root_rank`'s `tensor`.

    Differentiable: the root's gradient is the average of all ranks' gradients, the others' is zero, so every rank has
    to run that backward.

    Args:
        tensor: of any type; the same shape and type on all ranks.
        root_rank: as ranks are numbered in the whole job, also where the set has fewer.
        name: as for allreduce.
        process_set: by default all ranks.

    Raises:
        ArgumentError: the root or this rank is not in the set, or the name is in use.
        HorovodInternalError: on every rank: they disagree, inputs are intact; or one is gone.
        UnsupportedError: not in host memory.
    """
    require_plain(tensor)
    found: Tensor
    if wants_gradient(tensor):
        found = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call] # torch's own
    else:
        found = _submit(tensor, root_rank, name, process_set, in_place=False).wait()
    return found


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast`, which has no gradient, and return its handle for `synchronize` and `poll`."""
    return handle_of(_submit(tensor, root_rank, name, process_set, in_place=False))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite `tensor` with rank `root_rank`'s, and return it; otherwise as `broadcast`."""
    found: Tensor = _submit(tensor, root_rank, name, process_set, in_place=True).wait()
    return found


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast_`, and return its handle for `synchronize` and `poll`."""
    return handle_of(_submit(tensor, root_rank, name, process_set, in_place=True))


def _submit(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool) -> Pending:
    require_plain(tensor)
    members = members_of(process_set)
    root = world_rank_in(members, root_rank)
    signature = plain_signature(BROADCAST, dtype_name(tensor.dtype), tensor.shape, ((ROOT, str(int(root_rank))),))
    source = tensor.detach()
    memory = source
    if not (in_place and is_one_piece(source)):
        memory = new_memory(members.group, source.shape, source.dtype)
        if members.rank == root:
            memory.copy_(source)

    def start(group: Group, label: str) -> Handle:
        size_bytes = memory.numel() * memory.element_size()
        return group.broadcast_async(Buffer(memory.data_ptr(), (size_bytes,), (1,), "uint8", memory), root, label=label)

    def finish(_: Any) -> Tensor:
        if not in_place:
            return memory
        if members.rank != root:
            if memory is source:
                note_change(tensor)
            else:
                source.copy_(memory)
        return tensor

    return submit(members, name, signature, start, finish)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        found: Tensor = _submit(tensor, root_rank, name, process_set, in_place=False).wait()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        members = members_of(ctx.process_set)
        average = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        is_root = members.rank == world_rank_in(members, ctx.root_rank)
        return average if is_root else torch.zeros_like(average), None, None, None
