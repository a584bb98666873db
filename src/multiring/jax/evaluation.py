"""Collect the outputs of all ranks."""

from typing import Any

import jax
import numpy as np

from multiring._frontend.array_collectives import allgather
from multiring._frontend.evaluation import gathered
from multiring._frontend.process_sets import ProcessSet, global_process_set


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return the outputs of all ranks in rank order; the call is not traced.

    The rows of arrays and the elements of lists are concatenated. The values of dicts and tuples are gathered one by
    one; values of dicts are matched by key. Every rank calls this function, outside jit. A rank without samples passes
    arrays without rows, unlike for `allgather`.

    Raises:
        ArgumentError: an output is not an array, list, dict or tuple.
        CollectiveError: on every rank: outputs differ in keys or kinds, arrays differ in more than the number of their
            rows, or a rank is gone.
    """

    def rows(array: Any) -> Any:
        return jax.numpy.asarray(allgather(np.asarray(array), process_set=process_set))

    return gathered(outputs, lambda value: isinstance(value, jax.Array | np.ndarray), rows, process_set)
