"""What saving and loading need to know of a framework."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from multiring.frontend.checkpoint.arrays import Arrays, NumpyArrays
from multiring.frontend.checkpoint.tree import Special


class State(NamedTuple):
    """What is saved of an object.

    shared: its state, equal on all ranks: rank 0's is saved.
    own: what is this rank's own; None for nothing.
    beside: what belongs to it and is not in its state_dict; rank 0's, None for nothing.
    """

    shared: Any
    own: Any = None
    beside: Any = None


class Framework:
    """What a checkpoint needs to know of a framework; this one is NumPy."""

    arrays: Arrays = NumpyArrays()
    special: Mapping[type, Special] = {}

    def state(self, name: str, value: Any) -> State:  # noqa: ARG002 -- for errors of others
        """Return what is to be saved of an object that has a state_dict; every rank calls it.

        Raises:
            ArgumentError: it cannot be saved.
        """
        return State(value.state_dict())

    def places(self, name: str, value: Any, tree: Any) -> dict[str, Any]:  # noqa: ARG002 -- there are none
        """Return arrays of an object that the file's may be read into at once, by their names in the file.

        Args:
            name: of the part.
            value: an object with load_state_dict.
            tree: what the file has as its state.

        Raises:
            ArgumentError: the file has the state of another object.
        """
        return {}

    def load(self, name: str, value: Any, state: State) -> None:  # noqa: ARG002 -- for errors of others
        """Load a state into an object; `own` and `beside` are None where there is nothing for this rank."""
        value.load_state_dict(state.shared)

    def random_state(self) -> dict[str, Any]:
        """Return the states of the generators of random numbers."""
        return {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 -- programs use it

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Set the generators to what `random_state` returned."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 -- as above
