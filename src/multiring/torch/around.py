"""What a training script needs around its gradients: metrics, outputs, seeds, checkpoints."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multiring.errors import ArgumentError
from multiring.frontend import evaluation, first_rank
from multiring.frontend.checkpoint import saving
from multiring.frontend.checkpoint.tree import Stored
from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.gradients.compression_state import KEY
from multiring.torch.collectives.allgather import allgather
from multiring.torch.interop import bytes_of, dtype_name, dtype_of, in_one_piece
from multiring.torch.large_batch.stages import KEY as STAGES


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return all ranks' outputs, by rank: of tensors the rows, of lists the elements; in dicts and tuples each.

    Every rank calls it, also one that had no samples, with tensors of no rows; so that evaluation is exact where the
    last batches are uneven. Dicts go by their names, in whatever order a rank has them. No gradient comes back.

    Raises:
        ArgumentError: something is neither.
        HorovodInternalError: on every rank: outputs differ in names or kinds, tensors differ in more than their rows,
            or a rank is gone.
    """

    def rows(tensor: Tensor) -> Tensor:
        return allgather(tensor.detach(), process_set=process_set)

    return evaluation.gathered(outputs, _is_tensor, rows, process_set)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def seed_everything(seed: int | None = 0, *, differs: bool = False) -> int:
    """Seed the generators of Python, NumPy and torch; return this rank's seed. Every rank calls it.

    Args:
        seed: 0 to 2^32 - 1, the same on all ranks; None draws one.
        differs: whether each rank gets numbers of its own, as for dropout or augmentation.

    Raises:
        ArgumentError: it is out of range.
        MismatchError: on every rank: they want different seeds.
    """
    return first_rank.seed_everything(seed, [torch.manual_seed], differs=differs)


class _TensorArrays:
    """torch's tensors, in checkpoints."""

    def is_array(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def dump(self, array: Tensor) -> Stored:
        whole = in_one_piece(array.detach().cpu())
        return Stored(dtype_name(array.dtype), tuple(array.shape), bytes_of(whole).numpy())

    def make(self, stored: Stored) -> Tensor:
        if not len(stored.data):
            return torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        return torch.frombuffer(bytearray(stored.data), dtype=dtype_of(stored.dtype)).reshape(stored.shape)


class _Torch(saving.Framework):
    arrays = _TensorArrays()

    def is_model(self, value: Any) -> bool:
        return isinstance(value, nn.Module)

    def split(self, value: Any, state: Any) -> tuple[Any, Any]:
        if isinstance(value, nn.Module):  # running statistics, such as BatchNorm's, are of each rank's samples
            buffers = {name for name, _ in value.named_buffers()}
            return state, {name: each for name, each in state.items() if name in buffers} or None
        carried = state.get(KEY) if isinstance(state, Mapping) else None
        if not carried:
            return state, None
        own = {name: carried[name] for name in ("rank", "size", "residuals")}
        return {**state, KEY: {"queries": carried["queries"]}}, own

    def joined(self, value: Any, shared: Any, own: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            _require_own_options(value, shared)
        if own is None:
            return shared
        return {**shared, **(own if isinstance(value, nn.Module) else {KEY: {**shared[KEY], **own}})}

    def random_state(self) -> dict[str, Any]:
        return {**super().random_state(), "torch": torch.get_rng_state()}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        super().set_random_state(state)
        torch.set_rng_state(state["torch"])


def _require_own_options(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise ArgumentError where `state` is of another kind of optimizer: torch would take it, and fail in a step."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups or not optimizer.param_groups:
        return
    found, wanted = set(groups[0]), set(optimizer.param_groups[0])
    # Versions of torch add an option now and then; another optimizer's differ both ways.
    if found - wanted and wanted - found:
        raise ArgumentError(
            f"load: the checkpoint is another optimizer's: it has {', '.join(sorted(found - wanted))}, and "
            f"{type(optimizer).__name__} has {', '.join(sorted(wanted - found))}"
        )
    stages = state.get(STAGES)
    if stages and "_multiring_stages" not in vars(optimizer):
        raise ArgumentError(
            f"load: the checkpoint's optimizer has stages ({', '.join(stages)}), and this one has none; attach them "
            "first, as by gradient_lag or mixed_precision"
        )


def save(path: str | os.PathLike[str], *unnamed: Any, own: Any = None, randomness: bool = True, **parts: Any) -> None:
    """Save models, optimizers, schedulers and plain values to the folder `path`, in place of what is there.

    Every rank calls it, and the checkpoint is complete when it returns; what was there before stays until then. Rank 0
    writes what is equal, each rank what is its own: random numbers, a model's running statistics, what compression
    owes of its gradients, `own`.
    Arrays are safetensors, the rest is JSON.

        mt.save("run/last", model=model, optimizer=optimizer, epoch=epoch)

    Args:
        path: the same on all ranks; on a file system that they share, or on each host's own.
        own: a plain value of this rank's own.
        randomness: whether the states of the generators of random numbers are saved.
        unnamed: nothing; whatever is there is refused, with how it is meant.
        parts: objects with state_dict and load_state_dict, or numbers, strings, tensors, and dicts and lists of those.

    Raises:
        ArgumentError: a part is neither; nothing was saved.
        MismatchError: on the other ranks: one could not save.
        OSError: this rank could not write.
        UnsupportedError: safetensors is not installed.
    """
    _refuse_unnamed("save", path, unnamed)
    saving.save(path, _Torch(), parts, own=own, randomness=randomness)


def load(path: str | os.PathLike[str], *unnamed: Any, randomness: bool = True, **parts: Any) -> dict[str, Any]:
    """Load the last complete checkpoint of `path` into these models, optimizers and so on; return the other values.

    Every rank calls it; on any number of ranks. Nothing is unpickled.

        epoch = mt.load("run/last", model=model, optimizer=optimizer)["epoch"]

    Args:
        path: what `save` was given.
        randomness: whether the generators of random numbers go on from where they were, where there are as many ranks.
        unnamed: nothing; whatever is there is refused, with how it is meant.
        parts: what to load into, by the names under which it was saved.

    Returns:
        The values that are not among `parts`, by name; and under "own" what this rank saved so, or None on another
        number of ranks.

    Raises:
        ArgumentError: on every rank: there is no checkpoint, or a part is not in it; or it is damaged, or of another
            model, whose first difference is named.
        MismatchError: on the other ranks: one could not load.
        UnsupportedError: safetensors is not installed.
    """
    _refuse_unnamed("load", path, unnamed)
    return saving.load(path, _Torch(), parts, randomness=randomness)


def _refuse_unnamed(what: str, path: Any, unnamed: tuple[Any, ...]) -> None:
    """Raise ArgumentError where something came without a name, or no path did, as in torch.save."""
    if unnamed or not isinstance(path, str | os.PathLike):
        order = "" if isinstance(path, str | os.PathLike) else f"; the path comes first, not a {type(path).__name__}"
        raise ArgumentError(f'mt.{what}: want a path, and parts by name: mt.{what}("run/last", model=model){order}')
