"""broadcast_optimizer_state: send one rank's optimizer state to all ranks, as a JSON text and tensors."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of, world_rank_in
from multiring._gradients.compression_state import KEY
from multiring._runtime import Group
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.gathered_state import gather_state
from multiring.torch.gradients.parameters import broadcast_tensors
from multiring.torch.gradients.setup import require_optimizer
from multiring.torch.interop import dense_strides, dtype_name, placed, refuse_unserved
from multiring.torch.parallelizing.held import held_by, refuse_parts


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: nn.Module | None = None,  # noqa: ARG001 -- Horovod takes a step with it, multiring does not
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace the optimizer's state and options by those of rank `root_rank`.

    The learning rate, for example, is an option. State that a rank lacks is created, and state that the root does not
    have is dropped. Each rank keeps its own compression errors (error feedback).

    Args:
        optimizer: an optimizer with parameters of the same shapes in the same groups on all ranks.
        root_rank: the root's rank in the whole job, not in `process_set`.
        model: not used.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: `root_rank` is not in the set, the optimizer is LBFGS, or `parallelize` has divided the model
            among the ranks.
        CollectiveError: the optimizers differ in class or parameters, or a rank has failed. Every rank raises it.
        UnsupportedError: the state holds objects other than tensors, numbers, texts, lists, tuples and dicts.
    """
    members = members_of(process_set)
    with internal_errors("broadcast_optimizer_state"):
        _broadcast(members, optimizer, root_rank)


def _broadcast(members: Members, optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    group = members.group
    with reporting_errors(group, "broadcast_optimizer_state"):
        require_optimizer(optimizer)
        refuse_parts("broadcast_optimizer_state", held_by(optimizer), "mt.load loads a checkpoint on every rank")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentError("cannot broadcast torch.optim.LBFGS state: its steps depend on each rank's own loss")
        root = world_rank_in(members, root_rank)
        gather_state(optimizer)
        tensors: list[Tensor] = []
        text = ""
        if group.rank == root:
            text = json.dumps(_packed(_state_of_all(optimizer), "state_dict()", tensors))
    lines = [f"root_rank={root_rank}, optimizer {type(optimizer).__name__}"]
    for index, param_group in enumerate(optimizer.param_groups):
        lines += [f"group {index}, parameter of {placed(parameter)}" for parameter in param_group["params"]]
    require_alike(group, "broadcast_optimizer_state", lines)
    text = _broadcast_text(group, text, root)
    if group.rank == root:
        broadcast_tensors(group, tensors, root)
        return
    with _device_of(optimizer):
        state = _unpacked(json.loads(text), tensors)
    broadcast_tensors(group, tensors, root)
    optimizer.load_state_dict(state)


def _device_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return a context in which new tensors of the kind "cuda" are on the device of the optimizer's parameters."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.is_cuda]
    return torch.cuda.device(every[0].device) if every else nullcontext()


def _state_of_all(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict without this rank's own compression errors."""
    state = optimizer.state_dict()
    if KEY in state:
        state[KEY] = {name: value for name, value in state[KEY].items() if name != "residuals"}
    return state


def _broadcast_text(group: Group, text: str, root_rank: int) -> str:
    encoded = np.frombuffer(bytearray(text.encode()), np.uint8)
    size = np.array([len(encoded)], np.int64)
    group.broadcast(size, root_rank)
    if group.rank != root_rank:
        encoded = np.empty(int(size[0]), np.uint8)
    group.broadcast(encoded, root_rank)
    return encoded.tobytes().decode()


def _packed(value: Any, where: str, tensors: list[Tensor]) -> Any:
    """Return `value` in a form for JSON, and append its tensors to `tensors`.

    Plain values stay unchanged; other values become [kind, ...].
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        refuse_unserved(value, where)
        tensors.append(value)
        return ["tensor", dtype_name(value.dtype), value.shape, dense_strides(value), value.device.type]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_packed(each, f"{where}[{i}]", tensors) for i, each in enumerate(value)]]
    if isinstance(value, dict):
        pairs = [
            [_packed(key, where, tensors), _packed(each, f"{where}[{key!r}]", tensors)] for key, each in value.items()
        ]
        return ["dict", pairs]
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}; want tensors, numbers, texts, lists, tuples and dicts"
    )


def _unpacked(packed: Any, tensors: list[Tensor]) -> Any:
    """Return the value that `_packed` encoded, with new tensors; append these to `tensors` in the same order."""
    if not isinstance(packed, list):
        return packed
    kind, *content = packed
    return _MAKERS[kind](content, tensors)


def _tensor(content: list[Any], tensors: list[Tensor]) -> Tensor:
    dtype, shape, strides, device = content
    tensors.append(torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device))
    return tensors[-1]


_MAKERS: dict[str, Callable[[list[Any], list[Tensor]], Any]] = {
    "tensor": _tensor,
    "list": lambda content, tensors: [_unpacked(each, tensors) for each in content[0]],
    "tuple": lambda content, tensors: tuple(_unpacked(each, tensors) for each in content[0]),
    "dict": lambda content, tensors: {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in content[0]},
}
