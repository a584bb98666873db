"""distribute: turn a script for one process into a script for any number of ranks."""

import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from multiring._frontend.keras_optimizers import adopt_in_steps, is_distributed
from multiring._frontend.lifecycle import rank, size
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring.errors import ArgumentError, UnsupportedError
from multiring.keras import loss_reductions, metric_states, shards
from multiring.keras.hooks import around, around_evaluation, listed
from multiring.keras.loss_reductions import tell_once
from multiring.keras.metric_states import MetricStates
from multiring.keras.optimizer import DistributedOptimizer
from multiring.keras.replicas import same_data, same_variables
from multiring.keras.saving import SharedSaving
from multiring.keras.shards import ArrayShards, BatchDivision, Shards, ShuffledBatches, unwrapped
from multiring.keras.steps import ModelSteps, overrides
from multiring.keras.sync_batch_norm import synchronize
from multiring.keras.values import MARK, is_shared


def distribute(model: Any, *, compression: Any = None) -> Any:
    """Return `model`, changed so that `fit`, `evaluate` and `predict` run on all ranks together.

    Every rank calls these methods with the arguments that one process would pass. Each rank computes its part of every
    batch, so batches, steps and the learning rate do not depend on the number of ranks. The training starts from rank
    0's variables. Rank 0 alone shows progress and writes the files of callbacks. `evaluate` and `predict` return on
    each rank the results that one process would get. Batch normalization uses the samples of all ranks.

    Args:
        model: a model of Keras 3, compiled or not.
        compression: the type in which float32 gradients travel between hosts: a member of `Compression`, or its name.

    Raises:
        ArgumentError: `model` is not a model of Keras 3, or is distributed already.
    """
    if not isinstance(model, keras.Model):
        raise ArgumentError(f"distribute: got a {type(model).__name__}; want a keras.Model")
    if is_shared(model):
        raise ArgumentError("distribute was already called for this model; call it once for each model")
    size()  # raises NotInitializedError before init
    loss_reductions.install()
    metric_states.install()
    shards.install()
    adopt_in_steps(keras.optimizers.Optimizer)
    _Distribution(model, compression)
    setattr(model, MARK, True)
    return model


class _Distribution:
    """Replaces a model's methods by methods that run on all ranks together."""

    def __init__(self, model: Any, compression: Any) -> None:
        self._model = model
        self._compression = compression
        self._plain = {name: getattr(model, name) for name in ("compile", "fit", "evaluate", "predict")}
        for name, found in (
            ("compile", self.compile),
            ("fit", self.fit),
            ("evaluate", self.evaluate),
            ("predict", self.predict),
        ):
            setattr(model, name, functools.wraps(self._plain[name])(functools.partial(found)))
        self._steps = ModelSteps(model, self._adopt)
        self._states = MetricStates(model, self._steps)
        self._saving = SharedSaving(model)
        if model.compiled:
            self._take_over()

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Compile the model, and distribute its optimizers."""
        self._plain["compile"](*arguments, **keywords)
        self._take_over()

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """Train on this rank's part of every batch."""
        given = inspect.signature(self._plain["fit"]).bind(*arguments, **keywords).arguments
        x, y, weights = (given.pop(name, None) for name in ("x", "y", "sample_weight"))
        batch_size, verbose, own = (
            given.pop("batch_size", None),
            given.pop("verbose", "auto"),
            given.pop("callbacks", None),
        )
        split, validation = given.pop("validation_split", 0.0), given.pop("validation_data", None)
        if split and validation is None:
            (x, y, weights), validation = array_slicing.train_validation_split((x, y, weights), validation_split=split)
        training = self._training(
            x,
            y,
            weights,
            batch_size=batch_size,
            steps_per_epoch=given.get("steps_per_epoch"),
            shuffle=given.pop("shuffle", True),
            class_weight=given.pop("class_weight", None),
        )
        if validation is not None:
            each = (*validation, None, None)[:3] if isinstance(validation, tuple | list) else (validation, None, None)
            most = given.pop("validation_steps", None)
            size_ = given.pop("validation_batch_size", None) or batch_size
            given["validation_data"] = self._evaluated(*each, batch_size=size_, steps=most)
            given["validation_steps"] = _steps(most)
        self._prepare(training)
        given["callbacks"] = around(listed(own), self._states, self._saving)
        with self._saving.call():
            return self._plain["fit"](training, verbose=verbose if rank() == 0 else 0, shuffle=False, **given)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate this rank's batches, and combine the results of all ranks."""
        options = self._named("evaluate", arguments, keywords)
        x, y = options.pop("x", None), options.pop("y", None)
        if options.get("_use_cached_eval_dataset"):  # `fit` has already taken this rank's part
            return self._plain["evaluate"](x, y, **options)
        options["verbose"] = options.get("verbose", "auto") if rank() == 0 else 0
        most = options.pop("steps", None)
        weights, batch_size = options.pop("sample_weight", None), options.pop("batch_size", None)
        data = self._evaluated(x, y, weights, batch_size=batch_size, steps=most)
        self._synchronize()
        same_variables(self._model)
        options["callbacks"] = around_evaluation(options.get("callbacks"), self._saving)
        with self._saving.call():
            return self._plain["evaluate"](data, steps=_steps(most), **options)

    def predict(self, *arguments: Any, **keywords: Any) -> Any:
        """Predict arrays in parts, one part on each rank, and any other data on every rank."""
        options = self._named("predict", arguments, keywords)
        x = options.pop("x")
        options["verbose"] = options.get("verbose", "auto") if rank() == 0 else 0
        same_variables(self._model)
        options["callbacks"] = around_evaluation(options.get("callbacks"), self._saving)
        leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
        if options.get("steps") or not all(array_slicing.can_slice_array(leaf) for leaf in leaves):
            with self._saving.call():
                return self._plain["predict"](x, **options)
        same_data([x])
        rows = int(leaves[0].shape[0])
        own = np.array_split(np.arange(rows), size())[rank()]
        first = int(own[0]) if len(own) else 0
        part = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[first : first + max(1, len(own))], x
        )
        with self._saving.call():
            predicted = self._plain["predict"](part, **options)
        found = keras.tree.map_structure(lambda array: array[: len(own)], predicted)
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *allgather_object(found))

    def _named(self, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a method's call by name."""
        signature = inspect.signature(self._plain[method])
        if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
            # The model's own method passes its arguments on, so they are Keras'.
            keras_own = inspect.signature(getattr(keras.Model, method))
            signature = keras_own.replace(parameters=list(keras_own.parameters.values())[1:])  # without `self`
        bound = signature.bind(*arguments, **keywords).arguments
        others = [each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
        return {**(bound.pop(others[0], {}) if others else {}), **bound}

    def _take_over(self) -> None:
        model = self._model
        if model.jit_compile and keras.backend.backend() == "tensorflow":
            raise UnsupportedError(
                "jit_compile=True on TensorFlow: XLA has no collectives of multiring; want jit_compile=False in compile"
            )
        for optimizer in _optimizers_of(model):
            self._adopt(optimizer)

    def _adopt(self, optimizer: Any) -> None:
        if not is_distributed(optimizer):
            DistributedOptimizer(optimizer, compression=self._compression)

    def _synchronize(self) -> None:
        """Adapt the layers and metrics that were added to the model since the last call."""
        self._steps.follow_job()
        for layer in self._model._flatten_layers():  # noqa: SLF001 -- Keras has no other name for it
            synchronize(layer)
        self._states.watch()

    def _prepare(self, training: Any) -> None:
        self._take_over()
        self._synchronize()
        model = self._model
        if overrides(model, "train_step"):
            tell_once(
                f"{type(model).__name__} has its own train_step: the gradients that it passes to optimizers are "
                "averaged over the ranks, weighted by samples. This is right for the gradients of a mean over the "
                "samples, or of a loss of keras.losses, but not for those of a sum that train_step computes itself"
            )
        if not model.built and overrides(model, "call"):  # on TensorFlow, the first step would be too late
            _build(model, training)

    def _training(self, x: Any, y: Any, weights: Any, *, shuffle: Any, **options: Any) -> Any:
        seed = broadcast_object(int(np.random.randint(2**31))) if shuffle else 0  # noqa: NPY002 -- the generator that Keras seeds
        if isinstance(x, keras.utils.PyDataset) and shuffle and x.num_batches:
            x, shuffle = ShuffledBatches(x, seed), False
        adapter = _adapter(x, y, weights, shuffle=shuffle, **options)
        place = BatchDivision(rank(), size(), whole_batches=False)
        return (
            ArrayShards(adapter, place, shuffle, seed)
            if isinstance(adapter, ArrayDataAdapter)
            else Shards(adapter, place)
        )

    def _evaluated(self, x: Any, y: Any, weights: Any, *, batch_size: Any, steps: int | None) -> Any:
        adapter = _adapter(x, y, weights, batch_size=batch_size, steps_per_epoch=steps)
        place = BatchDivision(rank(), size(), whole_batches=True, most_batches=steps)
        return ArrayShards(adapter, place) if isinstance(adapter, ArrayDataAdapter) else Shards(adapter, place)


def _adapter(x: Any, y: Any, weights: Any, **options: Any) -> Any:
    """Return Keras' adapter of the data, after a check that all ranks have the same data.

    Raises:
        ArgumentError: on every rank: the ranks' data differ.
    """
    if isinstance(x, GeneratorType):
        x = _compared(x)
    elif not isinstance(x, keras.utils.PyDataset):
        leaves = [leaf for leaf in keras.tree.flatten((x, y, weights)) if leaf is not None]
        if all(array_slicing.can_slice_array(leaf) for leaf in leaves):
            same_data([x, y, weights])
        else:
            same_data(list(itertools.islice(x, 1)) if hasattr(x, "__iter__") else [])
    return EpochIterator(x=x, y=y, sample_weight=weights, **options).data_adapter


def _compared(batches: Any) -> Any:
    """Return a generator of the same batches; first compare the ranks' first batches."""
    first = list(itertools.islice(batches, 1))
    same_data(first)

    def all_of_them() -> Iterator[Any]:
        yield from first
        yield from batches

    return all_of_them()


def _steps(most: int | None) -> int | None:
    return None if most is None else -(-most // size())


def _optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers among a model's attributes, also inside lists and dicts."""
    found: dict[int, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, list | tuple):
            for each in value:
                look(each)
        elif isinstance(value, dict):
            for each in value.values():
                look(each)

    look(model.optimizer)
    for name, value in vars(model).items():
        if not name.startswith("_"):
            look(value)
    return [each for each in found.values() if not any(each in _within(other) for other in found.values())]


def _within(optimizer: Any) -> list[Any]:
    direct = [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else []
    return [*direct, *getattr(optimizer, "optimizers", ())]


def _build(model: Any, training: Any) -> None:
    batch = next(iter(training.get_numpy_iterator()), None)
    if batch is not None:
        x = keras.utils.unpack_x_y_sample_weight(unwrapped(batch)[1])[0]
        model(keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), x))
