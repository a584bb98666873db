"""Sample counts of all ranks, for loaders that skip unreadable samples."""

import numpy as np

from multiring._frontend.array_collectives import allgather
from multiring._frontend.lifecycle import size
from multiring._runtime import is_initialized


def count_in_job(samples: int) -> tuple[int, int]:
    """Return the sum and the minimum of the ranks' sample counts.

    Every rank calls this function for each batch.
    """
    if not is_initialized() or size() == 1:
        return samples, samples
    found = allgather(np.array([samples], np.int64), name="data.samples")
    return int(found.sum()), int(found.min())
