"""Ranks and sizes as tensors.

A graph reads the numbers when it runs, perhaps in another job.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from multiring._frontend.process_sets import ProcessSet, members_of


def ranks_now(process_set: ProcessSet) -> Any:
    """Return the number of ranks of `process_set`.

    A graph reads the number when it runs.
    """
    return now(lambda: members_of(process_set).size)


def now(ask: Callable[[], int]) -> Any:
    """Return the result of `ask()`. In a graph, `ask` is called when the graph runs."""
    return ask() if tf.executing_eagerly() else asked(ask)


def asked(ask: Callable[[], int], name: str | None = None) -> Any:
    """Return an operation that calls `ask` when it runs.

    The result of the operation is the result of `ask` as int32.
    """
    # Return a NumPy number. In a session of tf.compat.v1, a tensor would belong to the graph and have no value.
    found = tf.numpy_function(lambda: np.int32(ask()), [], tf.int32, stateful=True, name=name)
    found.set_shape([])
    return found
