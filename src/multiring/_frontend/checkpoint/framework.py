"""The interface of a framework for saving and loading."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from multiring._frontend.checkpoint.arrays import Arrays, NumpyArrays
from multiring._frontend.checkpoint.tree import Special


class SavedState(NamedTuple):
    """The saved state of an object.

    shared: the state that is equal on all ranks; rank 0 saves it.
    own: this rank's own state; None if there is none.
    beside: additional state that is not in the object's state_dict; rank 0 saves it. None if there is none.
    """

    shared: Any
    own: Any = None
    beside: Any = None


class Framework:
    """The operations that a checkpoint needs of a framework.

    This base class supports NumPy only.
    """

    arrays: Arrays = NumpyArrays()
    special: Mapping[type, Special] = {}

    def state(self, name: str, value: Any) -> SavedState:  # noqa: ARG002 -- subclasses use it in errors
        """Return the state to save of an object that has a state_dict.

        Every rank calls it.

        Raises:
            ArgumentError: the object cannot be saved.
        """
        return SavedState(value.state_dict())

    def places(self, name: str, value: Any, tree: Any) -> dict[str, Any]:  # noqa: ARG002 -- subclasses use them
        """Return arrays of an object that the file's arrays can be read into directly.

        The result has the arrays by their names in the file.

        Args:
            name: the name of the part.
            value: an object with load_state_dict.
            tree: the object's state in the file.

        Raises:
            ArgumentError: the state in the file does not fit the object.
        """
        return {}

    def load(self, name: str, value: Any, state: SavedState) -> None:  # noqa: ARG002 -- subclasses use it in errors
        """Load a state into an object.

        `own` and `beside` are None if the file has no such state for this rank.
        """
        value.load_state_dict(state.shared)

    def random_state(self) -> dict[str, Any]:
        """Return the states of the random number generators."""
        return {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 -- programs use it

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Restore the states that `random_state` returned."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 -- as above
