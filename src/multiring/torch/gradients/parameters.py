"""broadcast_parameters: give all ranks the parameters of one rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, world_rank_in
from multiring._runtime import Group
from multiring.errors import ArgumentError
from multiring.torch.interop import bytes_of, described, note_change, refuse_elsewhere
from multiring.torch.module_state import ModuleState, broadcast_rest
from multiring.torch.parallelizing.held import held_of, held_of_module, refuse_parts

_PARTED = "parallelize has given all ranks rank 0's parameters already; mt.load loads a checkpoint on every rank"
_EXTRA_STATE = "_extra_state"  # the ending that torch adds to the names of extra states


def broadcast_parameters(
    params: nn.Module | Mapping[str, Any] | Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite every rank's tensors with those of rank `root_rank`, in place.

    Args:
        params: a model, `model.state_dict()`, or a list of tensors or (name, tensor) pairs, such as
            `list(model.named_parameters())`. Names, shapes and types must be the same on all ranks. For a model, the
            buffers that it does not save and its extra state (`get_extra_state`) are broadcast too.
        root_rank: the root's rank in the whole job, not in `process_set`.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: `params` is of another kind, such as a generator; `params` has an element that is not a tensor;
            `params` is a state_dict with extra state, which is only a copy; `root_rank` is not in the set; or
            `parallelize` has divided the model among the ranks.
        CollectiveError: the ranks differ in names, shapes or types, or a rank has failed. Every rank raises it.
        UnsupportedError: a tensor is not in host memory, or not dense.
    """
    members = members_of(process_set)
    with internal_errors("broadcast_parameters"):
        with reporting_errors(members.group, "broadcast_parameters"):
            root = world_rank_in(members, root_rank)
            named = _named(params)
            held = held_of_module(params) if isinstance(params, nn.Module) else held_of(each for _, each in named)
            refuse_parts("broadcast_parameters", held, _PARTED)
        lines = [f"root_rank={root_rank}", *(f"{name}, {described(tensor)}" for name, tensor in named)]
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
        refuse_elsewhere(tensor, name)
    return named


def broadcast_tensors(group: Group, tensors: Sequence[Tensor], root: int) -> None:
    """Overwrite `tensors` with those of the group's rank `root`; shapes and types must be the same on all ranks."""
    with torch.no_grad():
        # Send the tensors in row-major order, because the ranks' strides may differ.
        rows = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        handles = [group.broadcast_async(bytes_of(row).numpy(), root) for row in rows]
        for tensor, row, handle in zip(tensors, rows, handles, strict=True):
            handle.wait()
            if group.rank == root:
                continue
            if row.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(row)
            note_change(tensor)
