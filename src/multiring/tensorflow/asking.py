"""Who this rank is: in a graph, which may run again in another job, when it runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from multiring.frontend.process_sets import ProcessSet, members_of


def ranks_now(process_set: ProcessSet) -> Any:
    """Return how many ranks the set has, in a graph when it runs."""
    return now(lambda: members_of(process_set).size)


def now(ask: Callable[[], int]) -> Any:
    """Return what `ask` returns, in a graph when it runs."""
    return ask() if tf.executing_eagerly() else asked(ask)


def asked(ask: Callable[[], int], name: str | None = None) -> Any:
    """Return an operation whose result, int32, is what `ask` returns when it runs."""
    # NumPy's number: in a session of tf.compat.v1 a constant made here would be a graph's, without a value.
    found = tf.numpy_function(lambda: np.int32(ask()), [], tf.int32, stateful=True, name=name)
    found.set_shape([])
    return found
