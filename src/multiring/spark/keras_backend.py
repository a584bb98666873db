"""A call that other processes unpickle with Keras on the backend of this process.

Keras chooses its backend when it is imported. So this module must not import Keras.
"""

import os
import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from multiring.errors import StateError


class BackendCall:
    """A function that uses Keras on a backend.

    Args:
        backend: the name of the backend.
        function: the function; its pickle may need Keras.
    """

    def __init__(self, backend: str, function: Callable[..., Any]) -> None:
        self._backend, self._function = backend, function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how to make it again."""
        return _again, (self._backend, import_module("cloudpickle").dumps(self._function))


def _again(backend: str, function: bytes) -> BackendCall:
    """Return the call.

    Raises:
        StateError: this process has imported Keras on another backend.
    """
    os.environ["KERAS_BACKEND"] = backend  # noqa: TID251 -- Keras reads it there only
    made = pickle.loads(function)  # noqa: S301 -- from the same application
    found = sys.modules["keras"].config.backend()
    if found != backend:
        raise StateError(
            f"Keras runs on the backend {found} in this process, but the model on {backend}: set "
            f"KERAS_BACKEND={backend} on the executors, or do not import Keras there"
        )
    return BackendCall(backend, made)
