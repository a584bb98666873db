"""The state of torch's modules and optimizers in checkpoints."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multiring._frontend.checkpoint.framework import SavedState
from multiring._frontend.checkpoint.tree import ARRAY, Flattener, Ref, entries_of, ref_of, refs_in
from multiring.errors import ArgumentError
from multiring.torch.checkpoint.tensors import (
    TensorArrays,
    can_be_filled,
    has_plain_values,
    is_plain_memory,
    is_uninitialized,
    placed_as,
    widens,
)
from multiring.torch.interop import dtype_name
from multiring.torch.parallelizing.held import is_dtensor

_ARRAYS = TensorArrays()
BUFFERS, _EXTRA = "buffers", "_extra_state"
# Name components that torch.compile, DistributedDataParallel, activation checkpointing and FSDP add around a module.
WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(name: str) -> str:
    """Return the name of a tensor or module without the components that wrappers add."""
    return ".".join(each for each in name.split(".") if each not in WRAPPERS)


def matched(own: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return a mapping from own names to saved names.

    The own and the saved names differ if only one of the two models was in wrappers.
    """
    mine, theirs = list(own), list(saved)
    same = {name: name for name in mine}
    if set(mine) == set(theirs):
        return same
    plain, found = ({unwrapped(name): name for name in names} for names in (mine, theirs))
    if len(plain) != len(set(mine)) or len(found) != len(set(theirs)) or set(plain) != set(found):
        return same
    return {name: found[short] for short, name in plain.items()}


def state_of_module(module: nn.Module) -> SavedState:
    """Return the state of a module for a checkpoint.

    Buffers, such as BatchNorm's running statistics, are saved for each rank by itself.
    """
    state = module.state_dict()
    buffers = {name: each for name, each in module.named_buffers(remove_duplicate=False) if not is_dtensor(each)}
    keys = _keys_of(module, state)
    # The module's author left these buffers out of its state_dict, but a bit-identical continuation needs them.
    beside = {name: each for name, each in buffers.items() if name not in keys and has_plain_values(each)}
    own = {keys[name]: state[keys[name]] for name in buffers if name in keys} | beside
    return SavedState(state, own or None, {BUFFERS: beside} if beside else None)


def _keys_of(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Map the names of a module's buffers to state_dict keys, except for buffers outside the state_dict."""
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    found = {name: name for name in buffers if name in state}
    # Some wrappers remove their components from state_dict keys only. A program's own module may have such a name, too.
    known = {*buffers, *(name for name, _ in module.named_parameters(remove_duplicate=False))}
    short = {unwrapped(key): key for key in state if key not in known}
    found.update((name, short[unwrapped(name)]) for name in buffers if name not in found and unwrapped(name) in short)
    return found


def places_in_module(name: str, module: nn.Module, tree: Any) -> dict[str, Tensor]:
    """Return a module's tensors by their names in the file, for loading in place.

    Raises:
        ArgumentError: the file belongs to a different model.
    """
    own = {key: each for key, each in module.state_dict().items() if isinstance(each, Tensor)}
    own = {key: each for key, each in own.items() if not key.endswith(_EXTRA)}
    saved = _tensors_in(tree)
    names = matched(own, saved)
    places = {}
    for key, mine in own.items():
        ref = saved.get(names[key])
        if is_uninitialized(mine):
            continue
        difference = _difference(ref, mine)
        if ref is None or difference:
            raise ArgumentError(f"load: the checkpoint is another model's: {name}.{key} {difference}")
        if can_be_filled(mine) and ref.kind == dtype_name(mine.dtype):
            places[ref.name] = mine
    known = {names[key] for key in own}
    more = [key for key in saved if key not in known]
    if more:
        raise ArgumentError(
            f"load: the checkpoint is another model's: {name}.{more[0]} is in the checkpoint, but not in this model"
        )
    return places


def _tensors_in(tree: Any) -> dict[str, Ref]:
    """Return references to the tensors in a module's saved `tree`, by their names in the module."""
    found = {}
    for key, each in entries_of(tree).items():
        if isinstance(each, dict) and list(each) == [ARRAY] and not key.endswith(_EXTRA):
            found[key] = ref_of(ARRAY, each[ARRAY])
    return found


def _difference(ref: Ref | None, mine: Tensor) -> str:
    """Return why a saved tensor cannot be loaded into `mine`, or "" if it can."""
    if ref is None:
        return "is not in the checkpoint"
    if ref.shape != tuple(mine.shape):
        return f"is of shape {ref.shape} in the checkpoint, but of shape {tuple(mine.shape)} in this model"
    if not widens(ref.kind, mine.dtype):
        dtype = dtype_name(mine.dtype)
        return (
            f"is {ref.kind} in the checkpoint, but {dtype} in this model, which would round it: want a model of that "
            "type, or convert the value that `load` returns without this part"
        )
    return ""


def load_module(module: nn.Module, state: SavedState) -> None:
    """Load the result of `state_of_module`, perhaps of a model in other wrappers."""
    own, shared = module.state_dict(), dict(state.shared)
    names = matched(own, shared)
    back = {saved: name for name, saved in names.items()}

    def here(saved: str) -> str:
        return back.get(saved, saved)

    loaded: OrderedDict[str, Any] = OrderedDict()
    loaded.update({here(key): each for key, each in shared.items()})
    mine = {here(key): each for key, each in (state.own or {}).items()}
    loaded.update((key, each) for key, each in mine.items() if key in loaded)
    for key, each in loaded.items():
        if isinstance(each, Tensor) and key in own and is_dtensor(own[key]):
            loaded[key] = placed_as(each, own[key])
    metadata = getattr(state.shared, "_metadata", None)
    if metadata is not None:
        paths = matched(getattr(own, "_metadata", {}), metadata)
        vars(loaded)["_metadata"] = {path: metadata[saved] for path, saved in paths.items() if saved in metadata}
    module.load_state_dict(loaded)
    beside = dict((state.beside or {}).get(BUFFERS, {}))
    beside.update((key, each) for key, each in (state.own or {}).items() if key not in shared)
    _load_beside(module, own, beside)


def _load_beside(module: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    """Load buffers outside the state_dict, if their shape and type have not changed."""
    kept = _keys_of(module, own)
    buffers = {name: each for name, each in module.named_buffers(remove_duplicate=False) if name not in kept}
    names = matched(buffers, saved)
    with torch.no_grad():
        for name, each in buffers.items():
            value = saved.get(names[name])
            if value is not None and value.shape == each.shape and value.dtype == each.dtype:
                each.copy_(value)


def places_in_optimizer(optimizer: torch.optim.Optimizer, state: Any, tree: Any) -> dict[str, Tensor]:
    """Return an optimizer's tensors by their names in the file, for loading in place.

    The result is empty if the file's state has another structure. Tensors that share memory, such as the learning rate
    of several groups, are left out, because the file may have several values for them.
    """
    flat = Flattener(_ARRAYS)
    if _skeleton(flat.tree(state, "optimizer")) != _skeleton(tree):
        return {}
    refs, own = list(refs_in(tree)), list(_tensors_of(state))
    if len(refs) != len(own):
        return {}
    uses = Counter(map(_storage_of, (*own, *(each for group in optimizer.param_groups for each in group["params"]))))
    return {
        ref.name: each
        for ref, each in zip(refs, own, strict=True)
        if not ref.is_numpy and can_be_filled(each) and uses[_storage_of(each)] == 1
    }


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if the storage is not in host memory."""
    return tensor.untyped_storage().data_ptr() if is_plain_memory(tensor) else 0


def _skeleton(tree: Any) -> Any:
    """Return `tree` without the names of arrays and without the values of numbers."""
    if isinstance(tree, list):
        return [_skeleton(each) for each in tree]
    if isinstance(tree, dict):
        if list(tree) == [ARRAY]:
            ref = ref_of(ARRAY, tree[ARRAY])
            return ref.kind, ref.shape
        return {key: _skeleton(each) for key, each in tree.items()}
    return type(tree) if isinstance(tree, float) else tree if isinstance(tree, str) else None


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each)


def laid_out(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """Return an optimizer's state, with each tensor laid out like its parameter.

    The layout is the distribution over the ranks and the order in memory. The order matters because a step sums in
    memory order, and another order would round differently.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if not isinstance(state, Mapping):
        return state
    by_parameter = {}
    for number, kept in dict(state.get("state", {})).items():
        like = parameters[number] if isinstance(number, int) and number < len(parameters) else None
        by_parameter[number] = kept
        if like is not None and isinstance(kept, Mapping):
            by_parameter[number] = {key: _laid_as(each, like) for key, each in kept.items()}
    found = {**state, "state": by_parameter}
    groups = state.get("param_groups")
    if isinstance(groups, list) and len(groups) == len(optimizer.param_groups):
        pairs = zip(groups, optimizer.param_groups, strict=True)
        found["param_groups"] = [_options_placed(saved, own) for saved, own in pairs]
    return found


def _options_placed(saved: Any, own: Mapping[str, Any]) -> Any:
    """Return a group's saved options, with tensors on the devices of the optimizer's own options."""
    if not isinstance(saved, Mapping):
        return saved
    return {
        key: each.to(own[key].device) if isinstance(each, Tensor) and isinstance(own.get(key), Tensor) else each
        for key, each in saved.items()
    }


def _laid_as(value: Any, like: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    if is_dtensor(like):
        return placed_as(value, like)
    if not has_plain_values(like) or value.stride() == like.stride():
        return value
    laid = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    return laid.copy_(value.detach()) if laid.stride() == like.stride() else value
