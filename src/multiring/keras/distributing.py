"""distribute: one call that makes a script for one process one for any number of ranks."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from multiring.errors import ArgumentError, UnsupportedError
from multiring.frontend.evaluation import mean
from multiring.frontend.keras_optimizers import is_distributed
from multiring.frontend.lifecycle import rank, size
from multiring.frontend.object_collectives import allgather_object, broadcast_object
from multiring.keras.callbacks import BroadcastGlobalVariablesCallback
from multiring.keras.optimizer import DistributedOptimizer
from multiring.keras.shards import (
    ArrayShards,
    BatchShards,
    array_of,
    dataset_shards,
    is_dataset,
    is_tensorflows,
    mapped,
    rows_in,
)

_BATCH = 32  # Keras' own
_MARK = "_multiring_is_distributed"


def distribute(model: Any, *, compression: Any = None) -> Any:
    """Return `model`, whose `fit`, `evaluate` and `predict` are those of all ranks together; every rank calls them.

    `fit` takes what it takes in one process, the same on all ranks: arrays, a PyDataset, or a tf.data.Dataset. Each
    rank computes its part of every batch, so that batches, steps and the learning rate stay what they are, whatever
    number of ranks there is. Rank 0's variables are everybody's; it alone shows progress. `evaluate` and `predict`
    return on each rank what one process would.

    Args:
        model: compiled, or to be compiled.
        compression: how gradients of float32 travel between hosts: one of Compression's.

    Raises:
        ArgumentError: it is no model of Keras 3, or it is distributed already.
    """
    if not isinstance(model, keras.Model):
        raise ArgumentError(f"distribute: a {type(model).__name__}; want a keras.Model")
    if getattr(model, _MARK, False):
        raise ArgumentError("this model is distributed already: want one call of distribute")
    size()  # NotInitializedError, where init was forgotten
    plain = {name: getattr(model, name) for name in ("compile", "fit", "evaluate", "predict")}

    @functools.wraps(plain["compile"])
    def compile_(*arguments: Any, **keywords: Any) -> None:
        plain["compile"](*arguments, **keywords)
        _take_over(model, compression)

    model.compile = compile_
    model.fit = functools.wraps(plain["fit"])(functools.partial(_fit, plain["fit"]))
    model.evaluate = functools.wraps(plain["evaluate"])(functools.partial(_evaluate, model, plain["evaluate"]))
    model.predict = functools.wraps(plain["predict"])(functools.partial(_predict, plain["predict"]))
    setattr(model, _MARK, True)
    if model.compiled:
        _take_over(model, compression)
    return model


def _take_over(model: Any, compression: Any) -> None:
    if model.jit_compile and keras.backend.backend() == "tensorflow":
        raise UnsupportedError(
            "jit_compile=True on TensorFlow: XLA has no collectives of multiring; want jit_compile=False in compile"
        )
    if not is_distributed(model.optimizer):
        DistributedOptimizer(model.optimizer, compression=compression)


class _Averaging(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Averages an epoch's metrics over the ranks, each rank's by its samples."""

    def __init__(self, validation_rows: int) -> None:
        super().__init__()
        self._validation_rows = validation_rows

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average, in place."""
        del epoch
        names = sorted(logs or ())
        for prefix, rows in ((False, 1), (True, self._validation_rows)):
            mine = {name: float(logs[name]) for name in names if name.startswith("val_") == prefix}
            if mine:
                logs |= mean(mine, rows)


def _fit(plain: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    given = inspect.signature(plain).bind(*arguments, **keywords).arguments
    x, y, weights = (given.pop(name, None) for name in ("x", "y", "sample_weight"))
    shuffle, batch_size = given.pop("shuffle", True), given.pop("batch_size", None)
    verbose, callbacks = given.pop("verbose", "auto"), given.pop("callbacks", None)
    validation_split, validation_data = given.pop("validation_split", 0.0), given.pop("validation_data", None)
    if is_dataset(x):
        training = _shards_of(x)
        shuffle = shuffle and not isinstance(x, keras.utils.PyDataset)
    else:
        data = [mapped(array_of, each) for each in (x, y, weights)]
        if validation_split and validation_data is None:
            kept = int(rows_in(data) * (1.0 - validation_split))
            validation_data = tuple(_cut(each, kept, None) for each in data)
            data = [_cut(each, 0, kept) for each in data]
        seed = broadcast_object(int(np.random.randint(2**31))) if shuffle else None  # noqa: NPY002 -- what Keras seeds
        training = ArrayShards(data, batch_size or _BATCH, _place(), seed)
        shuffle = False
    validation, rows = _validation(validation_data)
    own = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    more = list(own) if isinstance(own, list | tuple) else [own] if own else []
    return plain(
        training,
        verbose=verbose if rank() == 0 else 0,
        callbacks=[BroadcastGlobalVariablesCallback(0), _Averaging(rows), *more],
        validation_data=validation,
        validation_batch_size=given.pop("validation_batch_size", None) or batch_size,
        shuffle=shuffle,
        **given,
    )


def _validation(data: Any) -> tuple[Any, int]:
    """Return this rank's part of `data`, and how many samples it has."""
    if data is None:
        return None, 1
    if is_dataset(data):
        return _shards_of(data), 1
    return _part([mapped(array_of, each) for each in (*data, None)[:3]])


def _part(data: Sequence[Any]) -> tuple[Any, int]:
    """Return this rank's rows, at least one, and how many they are."""
    rows = rows_in(data)
    own = np.array_split(np.arange(rows), size())[rank()]
    first = int(own[0]) if len(own) else 0
    return tuple(_cut(each, first, first + max(1, len(own))) for each in data if each is not None), len(own)


def _evaluate(model: Any, plain: Callable[..., Any], x: Any = None, y: Any = None, **options: Any) -> Any:
    if options.pop("_use_cached_eval_dataset", False):  # of fit, on this rank's part, whose metrics fit averages
        return plain(x, y, _use_cached_eval_dataset=True, **options)
    as_dict = options.pop("return_dict", False)
    options["verbose"] = options.get("verbose", "auto") if rank() == 0 else 0
    weights = options.pop("sample_weight", None)
    if is_dataset(x):
        found, rows = plain(_shards_of(x), return_dict=True, **options), 1
    else:
        data = [mapped(array_of, each) for each in (x, y, weights)]
        part, rows = _part(data)
        names = [name for name, each in zip(("x", "y", "sample_weight"), data, strict=True) if each is not None]
        found = plain(**dict(zip(names, part, strict=True)), return_dict=True, **options)
    whole = mean({name: float(value) for name, value in found.items()}, rows)
    if as_dict:
        return whole
    # In the order that Keras has, which is not that of its dict.
    return model._flatten_metrics_in_order(whole)  # noqa: SLF001 -- it has no other name


def _predict(plain: Callable[..., Any], x: Any, **options: Any) -> Any:
    options["verbose"] = options.get("verbose", "auto") if rank() == 0 else 0
    if is_dataset(x):
        return plain(x, **options)  # whose samples every rank has
    part, rows = _part([mapped(array_of, x)])
    found = keras.tree.map_structure(lambda array: array[:rows], plain(part[0], **options))
    everybodys = allgather_object(found)
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *everybodys)


def _shards_of(data: Any) -> Any:
    if not is_tensorflows(data):
        return BatchShards(data, _place())
    firsts = allgather_object(
        [array_of(leaf).tobytes() for each in itertools.islice(data, 1) for leaf in keras.tree.flatten(each)]
    )
    if any(first != firsts[0] for first in firsts):
        raise ArgumentError(
            "the ranks' data sets differ in their first batch: want the same on all ranks, in the same order: "
            "keras.utils.set_random_seed before they are made, or shuffle(..., seed=...)"
        )
    return dataset_shards(data, _place())


def _place() -> tuple[int, int]:
    return rank(), size()


def _cut(data: Any, start: int, end: int | None) -> Any:
    return mapped(lambda array: array[start:end], data)
