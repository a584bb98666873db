"""The part of every batch that is a rank's: of arrays, PyDatasets, and tf.data.Datasets.

A batch of n samples is that of all ranks together: rank r has its samples r, r + ranks, and so on. Where ranks have
different numbers of them, samples are weighted, so that the average of the ranks' gradients is that of the whole batch;
a rank that has none has one of weight 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError


class ArrayShards(keras.utils.PyDataset):  # type: ignore[misc] # Keras has no types
    """A rank's part of every batch of arrays."""

    def __init__(self, data: Sequence[Any], batch_size: int, place: tuple[int, int], seed: int | None) -> None:
        """Be the part.

        Args:
            data: x, y and the samples' weights, each a structure of arrays of as many rows, or None.
            batch_size: of all ranks together.
            place: the rank, and how many there are.
            seed: of the order, the same on all ranks; None: as it is.
        """
        super().__init__()
        self._data = [mapped(array_of, each) for each in data]
        self._batch_size = batch_size
        self._rank, self._ranks = place
        self.rows = rows_in(self._data)
        self._random = None if seed is None else np.random.default_rng(seed)
        self._order = np.arange(self.rows)
        last = self.rows % batch_size
        self._is_even = not (batch_size % self._ranks or last % self._ranks)
        self.on_epoch_end()

    def __len__(self) -> int:
        """Return how many batches there are, the same on all ranks."""
        return math.ceil(self.rows / self._batch_size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return this rank's part of a batch: x, y, and weights where they are needed."""
        batch = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        own = batch[self._rank :: self._ranks]
        weight = len(own) * self._ranks / len(batch)
        own = own if len(own) else batch[:1]
        x, y, weights = (mapped(lambda array: array[own], each) for each in self._data)
        if weights is None and self._is_even:
            return (x,) if y is None else (x, y)
        given = np.ones(len(own), np.float32) if weights is None else weights
        return x, y, mapped(lambda array: array * np.asarray(weight, array.dtype), given)

    def on_epoch_end(self) -> None:
        """Take another order for the next epoch, where there is to be one."""
        if self._random is not None:
            self._random.shuffle(self._order)


class BatchShards(keras.utils.PyDataset):  # type: ignore[misc] # Keras has no types
    """A rank's part of every batch of a PyDataset, which all ranks read in the same order."""

    def __init__(self, batches: Any, place: tuple[int, int]) -> None:
        super().__init__(
            workers=batches.workers,
            use_multiprocessing=batches.use_multiprocessing,
            max_queue_size=batches.max_queue_size,
        )
        self._batches = batches
        self._place = place

    @property
    def num_batches(self) -> int | None:
        """How many batches there are."""
        found: int | None = self._batches.num_batches
        return found

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return this rank's part of a batch: x, y and weights."""
        batch = self._batches[index]
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        x, y, weights = (*parts, None, None)[:3]
        rows = rows_in([x, y])
        whole = ArrayShards([x, y, np.ones(rows, np.float32) if weights is None else weights], rows, self._place, None)
        return whole[0]

    def on_epoch_begin(self) -> None:
        """As of the PyDataset within."""
        self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """As of the PyDataset within."""
        self._batches.on_epoch_end()


def dataset_shards(dataset: Any, place: tuple[int, int]) -> Any:
    """Return a tf.data.Dataset of this rank's part of every batch of one, which all ranks read in the same order."""
    import tensorflow as tf  # noqa: PLC0415 -- whoever has a data set of it has it

    rank, ranks = place

    def part(*batch: Any) -> tuple[Any, ...]:
        x, y, weights = (*batch, None, None)[:3]
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        own = tf.range(rank, rows, ranks)
        weight = tf.cast(tf.size(own) * ranks / rows, tf.float32)
        own = tf.cond(tf.size(own) > 0, lambda: own, lambda: tf.zeros([1], tf.int32))
        x, y, weights = (
            None if each is None else tf.nest.map_structure(lambda tensor: tf.gather(tensor, own), each)
            for each in (x, y, weights)
        )
        given = tf.ones(tf.shape(own), tf.float32) if weights is None else weights
        return x, y, tf.nest.map_structure(lambda tensor: tensor * tf.cast(weight, tensor.dtype), given)

    return dataset.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def is_dataset(data: Any) -> bool:
    """Return whether `data` is a tf.data.Dataset, or a PyDataset."""
    return isinstance(data, keras.utils.PyDataset) or is_tensorflows(data)


def is_tensorflows(data: Any) -> bool:
    """Return whether `data` is a tf.data.Dataset."""
    return any(each.__module__.startswith("tensorflow.python.data") for each in type(data).__mro__)


def array_of(value: Any) -> NDArray[Any]:
    """Return `value`, a tensor, an array or a table, as an array."""
    return np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with the result of `function` for each of its arrays; None for None."""
    return None if structure is None else keras.tree.map_structure(function, structure)


def rows_in(data: Sequence[Any]) -> int:
    """Return how many rows all arrays in these structures have.

    Raises:
        ArgumentError: they have different numbers, or there are none.
    """
    counts = {
        np.shape(leaf)[0] if np.ndim(leaf) else 0
        for each in data
        if each is not None
        for leaf in keras.tree.flatten(each)
    }
    if len(counts) != 1:
        raise ArgumentError(f"arrays of {sorted(counts)} rows: want x, y and weights of as many samples")
    return counts.pop()
