"""Save and load the parameters, states and values of a training script."""

import os
from typing import Any

import jax
import numpy as np

from multiring.errors import ArgumentError
from multiring.frontend.checkpoint import saving
from multiring.frontend.checkpoint.framework import Framework


class _Pytree:
    """A pytree as a part of a checkpoint: its leaves as NumPy arrays, and its structure as text for comparison."""

    def __init__(self, name: str, tree: Any) -> None:
        self._name = name
        self.tree = tree

    def state_dict(self) -> dict[str, Any]:
        leaves, structure = jax.tree.flatten(self.tree)
        try:
            arrays = [np.asarray(each) if isinstance(each, jax.Array) else each for each in leaves]
        except TypeError as error:  # typed keys of random numbers have no NumPy array
            raise ArgumentError(f"save: {self._name}: {error}; save jax.random.key_data of a key") from error
        return {"leaves": arrays, "structure": str(structure)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own, structure = jax.tree.flatten(self.tree)
        leaves, saved = state["leaves"], state["structure"]
        if str(structure) != saved:
            raise ArgumentError(f"load: {self._name} has the structure {structure}, and the checkpoint has {saved}")
        for number, (mine, theirs) in enumerate(zip(own, leaves, strict=True)):
            if _form(mine) != _form(theirs):
                raise ArgumentError(
                    f"load: leaf {number} of {self._name} is {_form(mine)}, and the checkpoint has {_form(theirs)}"
                )
        arrays = [
            jax.numpy.asarray(theirs) if isinstance(mine, jax.Array) else theirs
            for mine, theirs in zip(own, leaves, strict=True)
        ]
        self.tree = jax.tree.unflatten(structure, arrays)


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
    held = {
        name: _Pytree(name, each) if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(each)) else each
        for name, each in parts.items()
    }
    saving.save(path, Framework(), held, own=own, randomness=randomness)


def load(path: str | os.PathLike[str], *, randomness: bool = True, **parts: Any) -> dict[str, Any]:
    """Load the last complete checkpoint of `path`, and return its parts by name.

    Every rank calls it. The number of ranks may have changed since the save. No data is unpickled.

        found = mj.load("run/last", parameters=parameters, state=optimizer.init(parameters))
        parameters, state, step = found["parameters"], found["state"], found["step"]

    Args:
        path: the path that was passed to `save`.
        randomness: whether to restore the states of the generators of Python and NumPy.
        parts: for each saved pytree of arrays, a pytree of the same structure, shapes and types.

    Returns:
        The pytrees in `parts` with the saved arrays, and the plain values. The value of "own" is this rank's.

    Raises:
        ArgumentError: there is no checkpoint; or a pytree differs from the saved one.
        MismatchError: another rank could not load.
    """
    held = {name: _Pytree(name, each) for name, each in parts.items()}
    values = saving.load(path, Framework(), held, randomness=randomness)
    return {**values, **{name: each.tree for name, each in held.items()}}
