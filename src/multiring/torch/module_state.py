"""The complete state of a module: parameters, saved and unsaved buffers, and extra state that is not a tensor."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multiring._frontend.consistency_check import reporting_errors
from multiring._frontend.errors import internal_errors
from multiring._frontend.object_collectives import broadcast_object
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of


@dataclass(frozen=True, slots=True)
class ModuleState:
    """The state of a module; its tensors are the module's own, not copies.

    tensors: the parameters, and the buffers that are in the state_dict.
    unsaved: the buffers that are not in the state_dict (`persistent=False`).
    extra: the other values of the state_dict, for example from `get_extra_state`.
    """

    tensors: dict[str, Tensor]
    unsaved: dict[str, Tensor]
    extra: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleState":
        """Return the current state of `module`."""
        state = module.state_dict()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        known = parameters | buffers
        return cls(
            tensors=parameters | {name: each for name, each in buffers.items() if name in state},
            unsaved={name: each for name, each in buffers.items() if name not in state},
            extra={name: value for name, value in state.items() if name not in known},
        )


def broadcast_rest(module: nn.Module, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Broadcast the unsaved buffers and the extra state of `module` from rank `root_rank` to all ranks.

    Raises:
        CollectiveError: a rank has failed; or another rank's state cannot be read or pickled.
    """
    members = members_of(process_set)
    with internal_errors("broadcast_parameters"), reporting_errors(members.group, "broadcast_parameters"):
        state = ModuleState.of(module)
    # Buffers travel in host memory: a device's number may not exist on another rank.
    sent = {name: (each.cpu(), each.device.type) for name, each in state.unsaved.items()}
    unsaved, extra = broadcast_object(
        (sent, state.extra), root_rank, name="broadcast_parameters.rest", process_set=process_set
    )
    if unsaved is not sent:
        device = next((each.device for each in module.parameters() if not each.is_cpu), None)
        placed = {name: each if kind == "cpu" else each.to(device or kind) for name, (each, kind) in unsaved.items()}
        set_rest(module, placed, extra)


def set_rest(module: nn.Module, unsaved: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """Set the unsaved buffers and the extra state of `module`."""
    with torch.no_grad():
        for name, value in unsaved.items():
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            own = holder._buffers.get(leaf)  # noqa: SLF001 -- torch has no other way to a buffer that may be None
            if own is not None and own.shape == value.shape and own.dtype is value.dtype:
                own.copy_(value)
            else:  # for example, a cache that the forward pass replaces
                holder._buffers[leaf] = value.clone()  # noqa: SLF001 -- as above
    if extra:
        module.load_state_dict({**module.state_dict(), **copy.deepcopy(dict(extra))})
