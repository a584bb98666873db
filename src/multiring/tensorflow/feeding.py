"""Data sets of `multiring.data` for TensorFlow and Keras: a tf.data.Dataset."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from multiring.data.dataset import Samples
from multiring.data.feeding.loader import Batch, Loader
from multiring.errors import ArgumentError, DataError
from multiring.frontend.job_place import job_place
from multiring.frontend.sample_counts import count_in_job


class DataLoader(Loader):
    """Batches of this rank's samples; see `multiring.data.Loader`, whose arguments it takes.

    `rank` and `ranks` are the job's where they are not given, as they are when an iteration begins. `dataset()` is what
    Keras and tf.data take.
    """

    def __init__(self, samples: Samples, batch: int, **options: Any) -> None:
        super().__init__(samples, batch, **options)
        if not options.keys() & {"rank", "ranks"}:
            self.follow(job_place)
            self.count_by(count_in_job)

    def dataset(self, *fields: str) -> Any:
        """Return a tf.data.Dataset of what is left of the epoch; each pass over it begins the next one.

        Args:
            fields: which of a record's arrays a batch has, as a tuple in this order; by default a dict of all.

        Raises:
            ArgumentError: a record has no such array.
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
                    if arrays[name].dtype != dtype:  # tf.data would narrow it
                        raise DataError(
                            f"{name} is {arrays[name].dtype} in a batch, and {dtype} in the data set's first sample, "
                            "which tf.data's specification was made of: want a transform that gives one type"
                        )
                yield tuple(arrays[name] for name in fields) if fields else arrays

        signature = tuple(specs[name] for name in fields) if fields else specs
        return tf.data.Dataset.from_generator(batches, output_signature=signature)
