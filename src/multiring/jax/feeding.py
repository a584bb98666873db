"""A loader that yields data sets of `multiring.data` as JAX arrays."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from multiring._arguments import shown
from multiring._frontend.job_place import job_place
from multiring._frontend.sample_counts import count_in_job
from multiring.data.dataset import Samples
from multiring.data.feeding.loader import Batch, Loader
from multiring.errors import ArgumentError, DataError


class DataLoader(Loader):
    """Yields batches of this rank's samples as JAX arrays.

    Apart from this, it works like `multiring.data.Loader`.

    If `rank` and `ranks` are not given, an iteration uses the job's values at its start. If the last batch of an epoch
    is divided unevenly, multiply the mean of a rank's losses by `loader.share.weight`.

    Args:
        samples: a Dataset or a Mixture.
        batch: samples of a step, on all ranks together.
        device: the device or sharding for the arrays, default: JAX's default device.
        options: other arguments of `multiring.data.Loader`.

    Raises:
        ArgumentError: as `multiring.data.Loader`; or `device` is no device and no sharding.
    """

    def __init__(self, samples: Samples, batch: int, *, device: Any = None, **options: Any) -> None:
        super().__init__(samples, batch, **options)
        # A device's class is JAX's own, and there are several forms of a place.
        if device is not None and type(device).__module__.partition(".")[0] not in {"jax", "jaxlib"}:
            raise ArgumentError(f"device={shown(device)}: want a device of jax.devices(), or a sharding")
        if not options.keys() & {"rank", "ranks"}:
            self.follow(job_place)
            self.count_by(count_in_job)
        self._device = device

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch. The next iteration yields the next epoch."""
        for batch in super().__iter__():
            yield {
                name: jax.device_put(exact(name, value), self._device) if isinstance(value, np.ndarray) else value
                for name, value in batch.items()
            }


def exact(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `array` after a check that JAX keeps its integers.

    Without its 64-bit mode, JAX narrows 64-bit types to 32 bits. Floats may be rounded, but integers would wrap around.

    Raises:
        DataError: an integer of the array needs more than 32 bits, and JAX would narrow it.
    """
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and kept != array.dtype and not np.array_equal(array.astype(kept), array):
        raise DataError(
            f"{name} has whole numbers of more than 32 bits, which JAX narrows to {kept}: call "
            "jax.config.update('jax_enable_x64', True), or use a transform that makes the numbers smaller"
        )
    return array
