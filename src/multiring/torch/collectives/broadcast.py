"""broadcast: send one rank's tensor to all ranks. The signatures are Horovod's."""

from typing import Any

import torch
from torch import Tensor

from multiring._frontend.handles import Name, Pending, Submitted, handle_of, submit
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of, world_rank_in
from multiring._frontend.reduce_ops import Average
from multiring._frontend.signatures import BROADCAST, ROOT, plain_signature
from multiring._runtime import Group, Handle
from multiring._runtime.arrays import Buffer
from multiring.torch.collectives.allreduce import allreduce
from multiring.torch.collectives.staged import Staged, Staging, host_memory, to_device
from multiring.torch.interop import dtype_name, is_one_piece, new_memory, note_change, require_plain, wants_gradient


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of rank `root_rank`.

    The operation is differentiable. The root's gradient is the average of all ranks' gradients; the other ranks'
    gradient is zero. Every rank must therefore run the backward pass.

    Args:
        tensor: a tensor of any type; the same shape and type on all ranks.
        root_rank: the root's rank in the whole job, not in `process_set`.
        name: as for `allreduce`.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: the root or this rank is not in the set, or another operation in progress has this name.
        CollectiveError: the ranks' calls differ (inputs are unchanged), or a rank has failed. Every rank raises
            it.
        UnsupportedError: the tensor is not dense, or neither in host memory nor on a CUDA device.
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
    """Start a `broadcast` without a gradient, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    return handle_of(_submit(tensor, root_rank, name, process_set, in_place=False))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Run a `broadcast` that overwrites `tensor` with the result, and return it."""
    found: Tensor = _submit(tensor, root_rank, name, process_set, in_place=True).wait()
    return found


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast_`, and return its handle.

    Pass the handle to `synchronize` or `poll`.
    """
    return handle_of(_submit(tensor, root_rank, name, process_set, in_place=True))


def _submit(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool) -> Submitted:
    require_plain(tensor)
    members = members_of(process_set)
    world_rank_in(members, root_rank)
    if not tensor.is_cpu:
        return _submit_staged(members, tensor, root_rank, name, in_place=in_place)
    return _submit_on_host(members, tensor, root_rank, name, in_place=in_place)


def _submit_staged(members: Members, tensor: Tensor, root_rank: int, name: Name, *, in_place: bool) -> Staged:
    is_root = members.rank == world_rank_in(members, root_rank)
    staging = Staging(members, BROADCAST, name, [tensor])
    with staging.preparing([tensor]):
        if is_root:
            host = staging.copied(tensor)
        else:
            host = host_memory(members.group, tensor.shape, tensor.dtype, tensor.device)

    def start(placed: Name) -> Pending:
        return _submit_on_host(members, host, root_rank, placed, in_place=True)

    device, own = tensor.device, tensor if in_place else None  # a tensor that is not needed may be freed at once

    def finish(found: Tensor) -> Tensor:
        return own if own is not None and is_root else to_device(members, found, device, own)

    return staging.submit(start, finish)


def _submit_on_host(members: Members, tensor: Tensor, root_rank: int, name: Name, *, in_place: bool) -> Pending:
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
