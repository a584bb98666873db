"""Ranks tell each other how many samples of a batch they could read, for loaders that leave some out."""

import numpy as np

from multiring.frontend.array_collectives import allgather
from multiring.frontend.lifecycle import size
from multiring.runtime import is_initialized


def count_in_job(samples: int) -> tuple[int, int]:
    """Return how many samples all ranks of the job have, and how many the rank has that has fewest.

    Every rank has to call it with each batch.
    """
    if not is_initialized() or size() == 1:
        return samples, samples
    found = allgather(np.array([samples], np.int64), name="data.samples")
    return int(found.sum()), int(found.min())
