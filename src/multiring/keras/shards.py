"""A rank's part of the data of `fit` and `evaluate`: its rows of every batch, or whole batches.

Keras reads the data as in one process: its own adapter weights classes, checks shapes and builds the structure that a
step gets. Each rank takes its part of the adapter's batches. The number of samples in the part is stored beside the
data (`wrapped`), never inside them.

- In training, the ranks share each batch: rank r has its samples r, r + ranks, and so on. A rank without samples gets
  the first sample as a placeholder, and its number of samples is 0.
- In evaluation, each rank has whole batches: rank r has the batches r, r + ranks, and so on. A batch is then computed
  as in one process. All ranks make equally many steps. A rank without a batch for its last step gets another rank's
  batch, with 0 as the number of samples.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from numpy.typing import NDArray

from multiring.errors import UnsupportedError

_PART, _DATA = "multiring.part", "multiring.data"
_COUNTS = 3  # columns before the indices in the table of a pass


def wrapped(data: Any, rows: Any, batch_rows: Any) -> dict[str, Any]:
    """Return a batch together with its sample counts.

    These are the number of this rank's rows and the number of rows in the whole batch.
    """
    return {_DATA: data, _PART: (rows, batch_rows)}


def unwrapped(batch: Any) -> tuple[Any, Any]:
    """Return the sample counts that `wrapped` has added, and the batch.

    The counts are None if the batch has none.
    """
    if isinstance(batch, dict) and batch.keys() == {_DATA, _PART}:
        return batch[_PART], batch[_DATA]
    return None, batch


@dataclass(frozen=True, slots=True)
class BatchDivision:
    """The number of this rank, and the way in which the ranks divide batches.

    whole_batches: whether each rank gets whole batches, as in evaluation, or its rows of each batch, as in training.
    most_batches: the maximum number of batches to use; None for all.
    """

    rank: int
    ranks: int
    whole_batches: bool
    most_batches: int | None = None

    def steps(self, batches: int | None) -> int | None:
        """Return the number of this rank's steps for a number of batches."""
        if batches is None:
            return None
        batches = min(batches, batches if self.most_batches is None else self.most_batches)
        return -(-batches // self.ranks) if self.whole_batches else batches

    def dealt(self, batches: Iterable[Any], part: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield this rank's part of an adapter's batches; `part` returns this rank's rows of a batch."""
        batches = itertools.islice(batches, self.most_batches)
        if not self.whole_batches:
            yield from map(part, batches)
            return
        batches = iter(batches)
        while group := list(itertools.islice(batches, self.ranks)):
            is_own = self.rank < len(group)
            yield wrapped(group[self.rank if is_own else 0], int(is_own), 1)


class Shards(DataAdapter):  # type: ignore[misc] # Keras has no types
    """This rank's part of the batches of another Keras adapter.

    The other adapter yields the same batches on all ranks.
    """

    def __init__(self, batches: Any, place: BatchDivision) -> None:
        self._batches = batches
        self._place = place

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return this rank's part of every batch, as NumPy arrays."""
        return self._place.dealt(self._batches.get_numpy_iterator(), self._rows)

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return this rank's part of every batch, as arrays that JAX accepts."""
        return self._place.dealt(self._batches.get_jax_iterator(), self._rows)

    def get_torch_dataloader(self) -> Any:
        """Return this rank's part of every batch, as torch tensors."""
        return iterable_loader(lambda: self._place.dealt(self._batches.get_torch_dataloader(), self._rows))

    def get_tf_dataset(self) -> Any:
        """Return this rank's part of every batch, as a tf.data.Dataset."""
        dataset = self._batches.get_tf_dataset()
        if self._place.most_batches is not None:
            dataset = dataset.take(self._place.most_batches)
        shared = _whole_batches(dataset, self._place) if self._place.whole_batches else _rows_of(dataset, self._place)
        import tensorflow as tf  # noqa: PLC0415 -- Keras calls this on TensorFlow only

        return shared.prefetch(tf.data.AUTOTUNE)

    @property
    def num_batches(self) -> int | None:
        """The number of this rank's steps; None if it is not known."""
        return self._place.steps(self._batches.num_batches)

    @property
    def batch_size(self) -> None:
        """None, because a rank has only parts of batches."""
        return

    has_partial_batch = False
    partial_batch_size = None

    def on_epoch_begin(self) -> None:
        """Call on_epoch_begin of the other adapter."""
        self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call on_epoch_end of the other adapter."""
        self._batches.on_epoch_end()

    def _rows(self, batch: Any) -> Any:
        total = rows_of(batch)
        rows = len(range(self._place.rank, total, self._place.ranks))
        first, step = (self._place.rank, self._place.ranks) if rows else (0, total)
        data = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[first::step], batch)
        return wrapped(data, rows, total)


class ArrayShards(DataAdapter):  # type: ignore[misc] # Keras has no types
    """This rank's part of arrays. It reads only the rank's own rows.

    Args:
        arrays: Keras' adapter of the arrays.
        place: see `BatchDivision`.
        shuffle: as for `fit`.
        seed: the seed of the order, the same on all ranks.
    """

    def __init__(self, arrays: ArrayDataAdapter, place: BatchDivision, shuffle: Any = False, seed: int = 0) -> None:
        self._inputs = arrays._inputs  # noqa: SLF001 -- Keras has no other name for it
        self._batch = int(arrays.batch_size)
        self._rows = rows_of(self._inputs)
        self._place, self._shuffle, self._seed = place, shuffle, seed
        self._passes = itertools.count()

    def plan(self) -> Iterator[tuple[NDArray[np.int64], int, int]]:
        """Yield this rank's rows for each step of a pass, and two counts.

        The counts are the number of this rank's rows, 0 for a placeholder, and the number of rows in the whole batch.
        """
        random = np.random.default_rng((self._seed, next(self._passes)))
        order = np.arange(self._rows)
        if self._shuffle and self._shuffle != "batch":
            random.shuffle(order)
        batches = [order[start : start + self._batch] for start in range(0, self._rows, self._batch)]
        if self._shuffle == "batch":
            batches = [random.permutation(batch) for batch in batches]
        for found in self._place.dealt(batches, self._part):
            (rows, total), indices = unwrapped(found)
            yield indices, rows, total

    def _part(self, batch: NDArray[np.int64]) -> Any:
        own = batch[self._place.rank :: self._place.ranks]
        return wrapped(own if len(own) else batch[:1], len(own), len(batch))

    def _most_rows(self) -> int:
        """Return the number of rows of the largest part of a batch."""
        largest = min(self._batch, self._rows)
        return largest if self._place.whole_batches else -(-largest // self._place.ranks)

    def _table(self) -> NDArray[np.int64]:
        """Return the plan of a pass as a table with a row for each step.

        The first three columns are the number of indices, the number of this rank's rows that count, and the number of
        rows in the whole batch. The indices of the rows to take follow.
        """
        plan = list(self.plan())
        table: NDArray[np.int64] = np.zeros((len(plan), _COUNTS + self._most_rows()), np.int64)
        for step, (indices, rows, total) in zip(table, plan, strict=True):
            step[:_COUNTS] = len(indices), rows, total
            step[_COUNTS : _COUNTS + len(indices)] = indices
        return table

    def _iterate(self, backend: str, convert: Callable[[Any, Any], Any]) -> Iterator[Any]:
        inputs = array_slicing.convert_to_sliceable(self._inputs, target_backend=backend)
        for indices, rows, total in self.plan():
            data = keras.tree.map_structure(
                lambda leaf, indices=indices: None if leaf is None else convert(leaf, leaf[indices]), inputs
            )
            yield wrapped(data, rows, total)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return this rank's part of every batch, as NumPy arrays."""
        return self._iterate("numpy", lambda leaf, rows: leaf.convert_to_numpy(rows))

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return this rank's part of every batch, as arrays that JAX accepts."""
        return self._iterate("jax", lambda leaf, rows: leaf.convert_to_jax_compatible(rows))

    def get_torch_dataloader(self) -> Any:
        """Return this rank's part of every batch, as torch tensors."""

        def convert(leaf: Any, rows: Any) -> Any:
            return keras.ops.convert_to_tensor(leaf.convert_to_torch_compatible(rows))

        return iterable_loader(lambda: self._iterate("torch", convert))

    def get_tf_dataset(self) -> Any:
        """Return this rank's part of every batch, as a tf.data.Dataset."""
        import tensorflow as tf  # noqa: PLC0415 -- Keras calls this on TensorFlow only

        inputs = keras.tree.lists_to_tuples(
            array_slicing.convert_to_sliceable(self._inputs, target_backend="tensorflow")
        )
        kind = array_slicing.TensorflowSparseWrapper

        def taken(step: Any, data: Any) -> Any:
            indices = step[_COUNTS : _COUNTS + step[0]]

            def one(leaf: Any) -> Any:
                if isinstance(leaf, kind):
                    return array_slicing.slice_tensorflow_sparse_wrapper(leaf, indices)
                if isinstance(leaf, list | tuple | dict):
                    return None  # `traverse` then visits the elements of the PyDataset's batches
                return tf.gather(leaf, indices, axis=0) if tf.is_tensor(leaf) else leaf

            return wrapped(keras.src.tree.traverse(one, data), step[1], step[2])

        def one_pass(_: Any) -> Any:
            found = tf.numpy_function(self._table, [], tf.int64, stateful=True)
            found.set_shape((None, _COUNTS + self._most_rows()))
            return found

        # Each `fit` builds this pipeline. Tracing a function or converting it by AutoGraph takes as long as some steps.
        plain = tf.autograph.experimental.do_not_convert
        if self._shuffle:
            plans = tf.data.Dataset.range(1).map(plain(one_pass)).unbatch()
        else:
            plans = tf.data.Dataset.from_tensor_slices(self._table())
        dataset = tf.data.Dataset.zip((plans, tf.data.Dataset.from_tensors(inputs).repeat()))
        dataset = dataset.map(plain(taken), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        options = tf.data.Options()  # as in Keras: the default optimizations would copy the arrays
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)

    @property
    def num_batches(self) -> int | None:
        """The number of this rank's steps."""
        return self._place.steps(math.ceil(self._rows / self._batch))

    @property
    def batch_size(self) -> None:
        """None, because a rank has only parts of batches."""
        return

    has_partial_batch = False
    partial_batch_size = None


class ShuffledBatches(keras.utils.PyDataset):  # type: ignore[misc] # Keras has no types
    """A PyDataset with a new order of batches in each epoch.

    The order is the same on all ranks.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        super().__init__(
            workers=batches.workers,
            use_multiprocessing=batches.use_multiprocessing,
            max_queue_size=batches.max_queue_size,
        )
        self._batches, self._seed, self._epoch = batches, seed, 0
        self._shuffle()

    def _shuffle(self) -> None:
        random = np.random.default_rng((self._seed, self._epoch))
        self._order = random.permutation(self._batches.num_batches)

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        """Return a batch."""
        return self._batches[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        """Call on_epoch_begin of the wrapped PyDataset."""
        self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call on_epoch_end of the wrapped PyDataset, and then choose a new order."""
        self._batches.on_epoch_end()
        self._epoch += 1
        self._shuffle()  # not in on_epoch_begin, because the reading processes have already started then


def install() -> None:
    """Make `fit` accept these adapters as its data.

    The oldest supported releases of Keras do not accept them.
    """
    plain = EpochIterator.__init__
    if hasattr(plain, "multiring"):
        return

    @functools.wraps(plain)
    def init(self: Any, x: Any, *arguments: Any, **keywords: Any) -> None:
        is_ours = isinstance(x, Shards | ArrayShards)
        plain(self, np.zeros((1, 1)) if is_ours else x, *arguments, **keywords)
        if is_ours:
            self.data_adapter, self._num_batches = x, x.num_batches

    init.multiring = True  # type: ignore[attr-defined]
    EpochIterator.__init__ = init


def iterable_loader(batches: Callable[[], Iterable[Any]]) -> Any:
    """Return a torch DataLoader that yields the batches unchanged; each pass calls `batches`."""
    from torch.utils import data  # noqa: PLC0415 -- Keras calls this on torch only

    class Batches(data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter(batches())

    return data.DataLoader(Batches(), batch_size=None, collate_fn=lambda batch: batch)


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch of arrays."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def _rows_of(dataset: Any, place: BatchDivision) -> Any:
    import tensorflow as tf  # noqa: PLC0415 -- as above

    def taken(leaf: Any, own: Any) -> Any:
        if isinstance(leaf, tf.experimental.Optional):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            raise UnsupportedError(
                "a tf.data.Dataset of sparse tensors cannot be divided among ranks by rows: make the tensors dense "
                "(tf.sparse.to_dense), or pass the sparse arrays to fit directly"
            )
        return tf.gather(leaf, own)

    def part(*batch: Any) -> Any:
        data = batch if len(batch) > 1 or isinstance(dataset.element_spec, tuple) else batch[0]
        leaf = next(each for each in tf.nest.flatten(data) if not isinstance(each, tf.experimental.Optional))
        total = tf.cast(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0], tf.int64)
        own = tf.range(place.rank, total, place.ranks, dtype=tf.int64)
        rows = tf.size(own, out_type=tf.int64)
        own = tf.cond(rows > 0, lambda: own, lambda: tf.zeros([1], tf.int64))
        return wrapped(tf.nest.map_structure(lambda each: taken(each, own), data), rows, total)

    plain = tf.autograph.experimental.do_not_convert(part)
    return dataset.map(plain, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _whole_batches(dataset: Any, place: BatchDivision) -> Any:
    import tensorflow as tf  # noqa: PLC0415 -- as above

    def marked(is_own: int) -> Any:
        def mark(*batch: Any) -> Any:
            data = batch if len(batch) > 1 or isinstance(dataset.element_spec, tuple) else batch[0]
            return wrapped(data, tf.constant(is_own, tf.int64), tf.constant(1, tf.int64))

        return tf.autograph.experimental.do_not_convert(mark)

    def dealt(*group: Any) -> Any:
        batches = tf.data.Dataset.zip(group if len(group) > 1 or isinstance(dataset.element_spec, tuple) else group[0])
        own = batches.skip(place.rank).map(marked(1))
        return own.concatenate(batches.take(1).map(marked(0))).take(1)

    return dataset.window(place.ranks).flat_map(tf.autograph.experimental.do_not_convert(dealt))
