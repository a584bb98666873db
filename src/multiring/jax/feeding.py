"""Data sets of `multiring.data` for JAX: a loader of its arrays."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from multiring.data.dataset import Samples
from multiring.data.feeding.loader import Batch, Loader
from multiring.errors import DataError
from multiring.frontend.job_place import job_place
from multiring.frontend.sample_counts import count_in_job


class DataLoader(Loader):
    """Batches of JAX's arrays of this rank's samples; see `multiring.data.Loader`, whose arguments it takes.

    `rank` and `ranks` are the job's where they are not given, as they are when an iteration begins.
    `loader.share.weight` is what the mean of a rank's losses counts for, where the last batch of an epoch is divided
    unevenly.

    Args:
        samples: a Dataset or a Mixture.
        batch: samples of a step, on all ranks together.
        device: where to put them, or a sharding; JAX's default where it is not said.
        options: of `multiring.data.Loader`.
    """

    def __init__(self, samples: Samples, batch: int, *, device: Any = None, **options: Any) -> None:
        super().__init__(samples, batch, **options)
        if not options.keys() & {"rank", "ranks"}:
            self.follow(job_place)
            self.count_by(count_in_job)
        self._device = device

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of the epoch; at its end, those of the next one."""
        for batch in super().__iter__():
            yield {
                name: jax.device_put(exact(name, value), self._device) if isinstance(value, np.ndarray) else value
                for name, value in batch.items()
            }


def exact(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array whose values JAX keeps, which without its 64-bit mode makes 32 bits of 64.

    Floats are rounded as that mode says; whole numbers would wrap around.

    Raises:
        DataError: there is a whole number of more than 32 bits.
    """
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and kept != array.dtype and not np.array_equal(array.astype(kept), array):
        raise DataError(
            f"{name} has whole numbers of more than 32 bits, which JAX narrows to {kept}: want "
            "jax.config.update('jax_enable_x64', True), or a transform that makes them smaller"
        )
    return array
