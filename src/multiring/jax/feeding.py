"""Data sets of `multiring.data` for JAX: a loader of its arrays."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from multiring.data.dataset import Samples
from multiring.data.feeding.loader import Batch, Loader
from multiring.frontend.lifecycle import rank, size
from multiring.runtime import is_initialized


class DataLoader(Loader):
    """Batches of JAX's arrays of this rank's samples; see `multiring.data.Loader`, whose arguments it takes.

    `rank` and `ranks` are the job's, where `init` was called before and they are not given. `loader.share.weight` is
    what the mean of a rank's losses counts for, where the last batch of an epoch is divided unevenly.

    Args:
        samples: a Dataset or a Mixture.
        batch: samples of a step, on all ranks together.
        device: where to put them, or a sharding; JAX's default where it is not said.
        options: of `multiring.data.Loader`.
    """

    def __init__(self, samples: Samples, batch: int, *, device: Any = None, **options: Any) -> None:
        here, ranks = (rank(), size()) if is_initialized() else (0, 1)
        super().__init__(samples, batch, **{"rank": here, "ranks": ranks, **options})
        self._device = device

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of the epoch; at its end, those of the next one."""
        for batch in super().__iter__():
            yield {
                name: jax.device_put(value, self._device) if isinstance(value, np.ndarray) else value
                for name, value in batch.items()
            }
