"""Save and load the models, optimizers and values of a training script."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from multiring._frontend.checkpoint import saving
from multiring._frontend.checkpoint.framework import Framework, SavedState
from multiring._frontend.checkpoint.tree import Special
from multiring._gradients.compression_state import KEY
from multiring.errors import ArgumentError
from multiring.torch.checkpoint.modules import (
    laid_out,
    load_module,
    places_in_module,
    places_in_optimizer,
    state_of_module,
)
from multiring.torch.checkpoint.tensors import TensorArrays
from multiring.torch.gathered_state import gather_state
from multiring.torch.interop import dtype_name, dtype_of
from multiring.torch.parallelizing.held import Held, held_by, held_of_module
from multiring.torch.path_agreement import settle_reductions
from multiring.torch.step.stages import KEY as STAGES


class _Torch(Framework):
    arrays = TensorArrays()
    special: Mapping[type, Special] = {
        torch.Size: Special(list, torch.Size),
        torch.device: Special(str, torch.device),
        torch.dtype: Special(dtype_name, dtype_of),
    }

    def state(self, name: str, value: Any) -> SavedState:  # noqa: ARG002 -- the signature of Framework
        gather_state(value)
        held = _in_stages(value)
        if held is not None:
            # Imported here, because the import takes half a second and few programs need it.
            from multiring.torch.parallelizing.checkpoints import whole_module_state, whole_optimizer_state  # noqa: PLC0415

            if isinstance(value, nn.Module):
                return whole_module_state(value, held)
            return SavedState(whole_optimizer_state(value, held, value.state_dict(), STAGES))
        if isinstance(value, nn.Module):
            return state_of_module(value)
        state = value.state_dict()
        carried = state.get(KEY) if isinstance(state, Mapping) else None
        if not carried:
            return SavedState(state)
        own = {key: carried[key] for key in ("rank", "size", "residuals")}
        return SavedState({**state, KEY: {"queries": carried["queries"]}}, own)

    def places(self, name: str, value: Any, tree: Any) -> dict[str, Any]:
        if _in_stages(value) is not None:
            return {}
        if isinstance(value, nn.Module):
            return dict(places_in_module(name, value, tree))
        if isinstance(value, torch.optim.Optimizer):
            return dict(places_in_optimizer(value, self.state(name, value).shared, tree))
        return {}

    def load(self, name: str, value: Any, state: SavedState) -> None:  # noqa: ARG002 -- the signature of Framework
        held, shared = _in_stages(value), state.shared
        if isinstance(value, torch.optim.Optimizer):
            _require_own_options(value, shared)
        if held is not None:
            from multiring.torch.parallelizing.checkpoints import load_whole_module, load_whole_optimizer  # noqa: PLC0415 -- as above

            if isinstance(value, nn.Module):
                load_whole_module(value, held, state)
            else:
                load_whole_optimizer(value, held, shared, STAGES)
            return
        if isinstance(value, nn.Module):
            load_module(value, state)
            return
        if isinstance(value, torch.optim.Optimizer):
            shared = laid_out(value, shared)
        if state.own is not None:
            shared = {**shared, KEY: {**shared[KEY], **state.own}}
        value.load_state_dict(shared)

    def random_state(self) -> dict[str, Any]:
        return {**super().random_state(), "torch": torch.get_rng_state()}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        super().set_random_state(state)
        torch.set_rng_state(state["torch"])


def _in_stages(value: Any) -> Held | None:
    """Return how a module's or optimizer's model is distributed; None unless in pipeline stages."""
    held = None
    if isinstance(value, nn.Module):
        held = held_of_module(value)
    elif isinstance(value, torch.optim.Optimizer):
        held = held_by(value)
    return None if held is None or held.stages is None else held


def _require_own_options(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise ArgumentError if `state` belongs to another kind of optimizer.

    torch would load such a state, and fail in a later step.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups or not optimizer.param_groups:
        return
    found, wanted = set(groups[0]), set(optimizer.param_groups[0])
    # A new version of torch may add an option. Two kinds of optimizers each have options that the other lacks.
    if found - wanted and wanted - found:
        raise ArgumentError(
            f"load: the checkpoint is another optimizer's: it has {', '.join(sorted(found - wanted))}, and "
            f"{type(optimizer).__name__} has {', '.join(sorted(wanted - found))}"
        )
    stages = state.get(STAGES)
    if stages and "_multiring_stages" not in vars(optimizer):
        raise ArgumentError(
            f"load: the checkpoint's optimizer has stages ({', '.join(stages)}), and this one has none; attach them "
            "first, for example by gradient_lag or mixed_precision"
        )


def save(path: str | os.PathLike[str], *unnamed: Any, own: Any = None, randomness: bool = True, **parts: Any) -> None:
    """Save models, optimizers and plain values as the checkpoint in folder `path`.

    Every rank calls it. When it returns, the new checkpoint is complete; until then, the previous one remains. Rank 0
    writes the state that all ranks share. Each rank writes its own state: random number generators, a model's running
    statistics, the residuals of gradient compression, and `own`. Arrays are saved as safetensors, and everything else
    as JSON.

        mt.save("run/last", model=model, optimizer=optimizer, epoch=epoch)

    Args:
        path: the same on all ranks, on a shared file system or on each host's own.
        own: a plain value of this rank.
        randomness: whether to save the states of the random number generators.
        unnamed: must be empty. Positional parts are refused with an example of the right call.
        parts: objects with state_dict and load_state_dict, or numbers, strings, tensors, and dicts and lists of those.

    Raises:
        ArgumentError: a part is of none of these kinds. Nothing was saved.
        CollectiveError: a reduction of gradients on a device has failed. Nothing was saved.
        MismatchError: another rank could not save.
        OSError: this rank could not write.
        UnsupportedError: safetensors is not installed.
    """
    _refuse_unnamed("save", path, unnamed)
    settle_reductions()
    saving.save(path, _Torch(), parts, own=own, randomness=randomness)


def load(path: str | os.PathLike[str], *unnamed: Any, randomness: bool = True, **parts: Any) -> dict[str, Any]:
    """Load the last complete checkpoint of `path` into `parts`; return other values.

    Every rank calls it. The number of ranks may have changed since the save. No data is unpickled.

        epoch = mt.load("run/last", model=model, optimizer=optimizer)["epoch"]

    Args:
        path: the path that was passed to `save`.
        randomness: whether to restore the random number generators, if the number of ranks is the same.
        unnamed: must be empty. Positional parts are refused with an example of the right call.
        parts: the models, optimizers and other objects to load into, by the names under which they were saved.

    Returns:
        The saved values that are not among `parts`, by name. The name "own" has the value that this rank saved as
        `own`, or None if the number of ranks differs.

    Raises:
        ArgumentError: there is no checkpoint, or it is damaged, lacks a part, or belongs to a different model. Every
            rank raises it; the text names the first difference.
        MismatchError: another rank could not load.
        UnsupportedError: safetensors is not installed.
    """
    _refuse_unnamed("load", path, unnamed)
    return saving.load(path, _Torch(), parts, randomness=randomness)


def _refuse_unnamed(what: str, path: Any, unnamed: tuple[Any, ...]) -> None:
    """Raise ArgumentError if the call has the argument order of torch.save, or a part without a name."""
    if unnamed or not isinstance(path, str | os.PathLike):
        order = "" if isinstance(path, str | os.PathLike) else f"; the path comes first, not a {type(path).__name__}"
        raise ArgumentError(f'mt.{what}: want a path, and parts by name: mt.{what}("run/last", model=model){order}')
