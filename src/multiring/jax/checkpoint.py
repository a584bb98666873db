"""Save and load the parameters, states and values of a training script."""

import os
from typing import Any

import jax
import numpy as np

from multiring._frontend.checkpoint import saving
from multiring._frontend.checkpoint.framework import Framework
from multiring.errors import ArgumentError

_LEAVES, _PATHS = "leaves of a pytree", "paths of its leaves"


class _Pytree:
    """A pytree as a part of a checkpoint: its leaves, with NumPy arrays for JAX's, and their paths for comparison.

    The static fields of a pytree's nodes are neither saved nor compared: they are code, such as an optimizer's
    functions, whose text differs between processes.
    """

    def __init__(self, name: str, tree: Any) -> None:
        self._name = name
        self.tree = tree

    def state_dict(self) -> dict[str, Any]:
        try:
            arrays = [np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in jax.tree.leaves(self.tree)]
        except TypeError as error:  # typed keys of random numbers have no NumPy array
            raise ArgumentError(f"save: {self._name}: {error}; save jax.random.key_data of a key") from error
        return {_LEAVES: arrays, _PATHS: _paths_of(self.tree)}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, dict) or set(state) != {_LEAVES, _PATHS}:  # `save` got a plain value
            self.tree = state
            return
        own, structure = jax.tree.flatten(self.tree)
        leaves, paths, saved = state[_LEAVES], _paths_of(self.tree), state[_PATHS]
        if paths != saved:
            raise ArgumentError(
                f"load: {self._name} has the leaves {_some(paths)}, and the checkpoint has {_some(saved)}"
            )
        for path, mine, theirs in zip(paths, own, leaves, strict=True):
            if _form(mine) != _form(theirs):
                raise ArgumentError(
                    f"load: {self._name}{path} is {_form(mine)}, and the checkpoint has {_form(theirs)}"
                )
        arrays = [
            jax.numpy.asarray(theirs) if isinstance(mine, jax.Array) else theirs
            for mine, theirs in zip(own, leaves, strict=True)
        ]
        self.tree = jax.tree.unflatten(structure, arrays)


def _paths_of(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:20]) + (f" and {len(paths) - 20} more" if len(paths) > 20 else "") if paths else "none"


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint holds `value` as it is: without JAX arrays, in dicts, lists and tuples only."""
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) in {list, tuple}:
        return all(map(_is_plain, value))
    # JAX takes None for a node without leaves.
    return value is None or (not isinstance(value, jax.Array) and jax.tree_util.all_leaves([value]))


def _form(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | np.ndarray):
        return f"{leaf.dtype.name} of shape {tuple(leaf.shape)}"
    return f"a {type(leaf).__name__}"


def save(path: str | os.PathLike[str], *, own: Any = None, randomness: bool = True, **parts: Any) -> None:
    """Save pytrees and plain values as the checkpoint in folder `path`.

    Every rank calls it, outside jit. When it returns, the new checkpoint is complete; until then, the previous one
    remains. Rank 0 writes the parts, and each rank writes its own values. Arrays are saved as safetensors, and
    everything else as JSON.

        mj.save("run/last", parameters=parameters, state=state, step=step)

    Args:
        path: the same on all ranks, on a shared file system or on each host's own.
        own: a plain value of this rank.
        randomness: whether to save the states of the generators of Python and NumPy.
        parts: pytrees with arrays of JAX; or numbers, strings, NumPy arrays, and dicts and lists of those.

    Raises:
        ArgumentError: a part is of none of these kinds. Nothing was saved.
        MismatchError: another rank could not save.
        OSError: this rank could not write.
    """
    held = {name: each if _is_plain(each) else _Pytree(name, each) for name, each in parts.items()}
    saving.save(path, Framework(), held, own=own, randomness=randomness)


def load(path: str | os.PathLike[str], *, randomness: bool = True, **parts: Any) -> dict[str, Any]:
    """Load the last complete checkpoint of `path`, and return its parts by name.

    Every rank calls it. The number of ranks may have changed since the save. No data is unpickled.

        found = mj.load("run/last", parameters=parameters, state=optimizer.init(parameters))
        parameters, state, step = found["parameters"], found["state"], found["step"]

    Args:
        path: the path that was passed to `save`.
        randomness: whether to restore the states of the generators of Python and NumPy.
        parts: for each saved pytree, a pytree whose leaves have the same paths, shapes and types.

    Returns:
        The pytrees in `parts` with the saved arrays, and the plain values. The value of "own" is this rank's.

    Raises:
        ArgumentError: there is no checkpoint; or a pytree differs from the saved one.
        MismatchError: another rank could not load.
    """
    held = {name: _Pytree(name, each) for name, each in parts.items()}
    values = saving.load(path, Framework(), held, randomness=randomness)
    return {**values, **{name: each.tree for name, each in held.items()}}
