"""broadcast_parameters: give all ranks the parameters of one rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, world_rank_in
from multiring._runtime import Group
from multiring._runtime.group.declining import declining
from multiring.errors import ArgumentError
from multiring.torch.collectives.staged import host_memory
from multiring.torch.device_staging import staging_of
from multiring.torch.interop import bytes_of, in_one_piece, note_change, placed, refuse_unserved
from multiring.torch.module_state import ModuleState, broadcast_rest
from multiring.torch.parallelizing.held import held_of, held_of_module, refuse_parts

_PARTED = "parallelize has given all ranks rank 0's parameters already; mt.load loads a checkpoint on every rank"
_PORTION_BYTES = 256 << 20
_EXTRA_STATE = "_extra_state"  # the ending that torch adds to the names of extra states


def broadcast_parameters(
    params: nn.Module | Mapping[str, Any] | Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite every rank's tensors with those of rank `root_rank`, in place.

    Args:
        params: a model, `model.state_dict()`, or a list of tensors or (name, tensor) pairs, such as
            `list(model.named_parameters())`. Names, shapes, types and kinds of devices must be the same
            on all ranks. For a model, the buffers that it does not save and its extra state (`get_extra_state`) are
            broadcast too.
        root_rank: the root's rank in the whole job, not in `process_set`.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: `params` is of another kind, such as a generator; `params` has an element that is not a tensor;
            `params` is a state_dict with extra state, which is only a copy; `root_rank` is not in the set; or
            `parallelize` has divided the model among the ranks.
        CollectiveError: the ranks differ in names, shapes, types or kinds of devices, or a rank has failed. Every
            rank raises it.
        UnsupportedError: a tensor is on a device that multiring does not serve, or not dense.
    """
    members = members_of(process_set)
    with internal_errors("broadcast_parameters"):
        with reporting_errors(members.group, "broadcast_parameters"):
            root = world_rank_in(members, root_rank)
            named = _named(params)
            held = held_of_module(params) if isinstance(params, nn.Module) else held_of(each for _, each in named)
            refuse_parts("broadcast_parameters", held, _PARTED)
        lines = [f"root_rank={root_rank}", *(f"{name}, {placed(tensor)}" for name, tensor in named)]
        require_alike(members.group, "broadcast_parameters", lines)
        broadcast_tensors(members.group, [tensor for _, tensor in named], root)
    if isinstance(params, nn.Module):
        broadcast_rest(params, root_rank, process_set)


def _named(params: Any) -> list[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        named: list[tuple[str, Any]] = list(ModuleState.of(params).tensors.items())
    elif isinstance(params, Mapping):
        named = list(params.items())
        extra = next((name for name, _ in named if name.endswith(_EXTRA_STATE)), None)
        if extra is not None:
            raise ArgumentError(
                f"{extra} is a copy that get_extra_state made, and the module would not see what is written into it: "
                "pass the model itself, as in broadcast_parameters(model, root_rank=0)"
            )
    elif isinstance(params, list | tuple):
        named = [each if isinstance(each, tuple) else (str(index), each) for index, each in enumerate(params)]
    else:
        raise ArgumentError(
            f"invalid params of type: {type(params).__name__}; want a model, a state_dict, or a list such as "
            "list(model.named_parameters())"
        )
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}; want a tensor")
        refuse_unserved(tensor, name)
    return named


def broadcast_tensors(group: Group, tensors: Sequence[Tensor], root: int) -> None:
    """Overwrite `tensors` with those of the group's rank `root`; shapes and types must be the same on all ranks."""
    on_host = [tensor for tensor in tensors if tensor.is_cpu]
    with torch.no_grad():
        # Send the tensors in row-major order, because the ranks' strides may differ.
        rows = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in on_host]
        handles = [group.broadcast_async(bytes_of(row).numpy(), root) for row in rows]
        for tensor, row, handle in zip(on_host, rows, handles, strict=True):
            handle.wait()
            if group.rank == root:
                continue
            if row.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(row)
            note_change(tensor)
        for several in _portions([tensor for tensor in tensors if not tensor.is_cpu]):
            _broadcast_from_devices(group, several, root)


def _portions(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in portions of limited size, because each portion needs pinned memory of its size."""
    portion: list[Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        portion.append(tensor)
        size_bytes += tensor.numel() * tensor.element_size()
        if size_bytes >= _PORTION_BYTES:
            yield portion
            portion, size_bytes = [], 0
    if portion:
        yield portion


def _broadcast_from_devices(group: Group, tensors: Sequence[Tensor], root: int) -> None:
    """Broadcast tensors of devices through pinned memory. The root's thread waits for its devices."""
    with declining(group, len(tensors)):
        hosts = [host_memory(group, tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if group.rank == root:
            pairs = zip(tensors, hosts, strict=True)
            for event in [staging_of(tensor.device).to_host(in_one_piece(tensor), host) for tensor, host in pairs]:
                event.synchronize()
    handles = [group.broadcast_async(bytes_of(host).numpy(), root) for host in hosts]
    for tensor, host, handle in zip(tensors, hosts, handles, strict=True):
        handle.wait()
        if group.rank != root:
            staging_of(tensor.device).to_device(host, tensor.detach())
