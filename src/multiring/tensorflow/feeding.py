"""A loader that turns data sets of `multiring.data` into a tf.data.Dataset.

It is for TensorFlow and Keras.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from multiring._frontend.job_place import job_place
from multiring._frontend.sample_counts import count_in_job
from multiring.data.dataset import Samples
from multiring.data.feeding.loader import Batch, Loader
from multiring.errors import ArgumentError, DataError


class DataLoader(Loader):
    """Yields batches of this rank's samples.

    It takes the arguments of `multiring.data.Loader`.

    If `rank` and `ranks` are not given, an iteration uses the job's values at its start. `dataset()` makes a data set
    for Keras and tf.data.
    """

    def __init__(self, samples: Samples, batch: int, **options: Any) -> None:
        super().__init__(samples, batch, **options)
        if not options.keys() & {"rank", "ranks"}:
            self.follow(job_place)
            self.count_by(count_in_job)

    def dataset(self, *fields: str) -> Any:
        """Return a tf.data.Dataset of the rest of the epoch.

        The next pass over it yields the next epoch.

        Args:
            fields: names of arrays of a record. A batch is the tuple of these arrays. By default a batch is a dict of
                all arrays.

        Raises:
            ArgumentError: a record has no array of such a name.
        """
        layout = self.layout()
        unknown = [each for each in fields if each not in layout.arrays]
        if unknown:
            raise ArgumentError(f"fields {unknown}: the records have the arrays {sorted(layout.arrays)}")
        specs = {
            name: tf.TensorSpec((None, *shape), tf.as_dtype(dtype)) for name, (shape, dtype) in layout.arrays.items()
        }

        def batches() -> Iterator[Any]:
            for batch in self:
                arrays: Batch = {name: value for name, value in batch.items() if isinstance(value, np.ndarray)}
                for name, (_, dtype) in layout.arrays.items():
                    if arrays[name].dtype != dtype:  # tf.data would convert the array to the narrower type
                        raise DataError(
                            f"{name} is {arrays[name].dtype} in a batch, but {dtype} in the data set's first sample, "
                            "which set the specification for tf.data: want a transform that returns a single type"
                        )
                yield tuple(arrays[name] for name in fields) if fields else arrays

        signature = tuple(specs[name] for name in fields) if fields else specs
        return tf.data.Dataset.from_generator(batches, output_signature=signature)
