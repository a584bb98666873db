"""`KerasEstimator`: train a Keras 3 model on the rows of a DataFrame. Horovod's name is horovod.spark.keras."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from multiring.errors import ArgumentError
from multiring.spark.keras_backend import BackendCall
from multiring.spark.parquet_estimator import (
    Columns,
    EstimatorTraining,
    ParquetEstimator,
    RowModel,
    Trained,
    names,
    pickled,
    row_shape,
    unpickled,
)


class KerasEstimator(ParquetEstimator):
    """Train a Keras model on all ranks of a Spark application.

    Args:
        model: a model of Keras 3. It is called with an array for each of `feature_cols`, and returns an output for each
            of `label_cols`.
        optimizer: as in `model.compile`.
        loss: as in `model.compile`.
        feature_cols: the columns of the inputs: numbers, arrays of numbers, or Spark's vectors.
        label_cols: the columns of the labels.
        store: a folder or URL that the driver and all hosts see. `fit` writes Parquet there, and removes it at the end.
        metrics: as in `model.compile`.
        num_proc: the number of ranks. Default: `spark.default.parallelism`.
        batch_size: the number of rows of a step on each rank.
        epochs: how often to use each row.
        validation: the fraction of the rows that are left out of the training, to compute `val_loss`.
        input_shapes: the shape of each input of one row. Default: as stored.
        random_seed: of the order of the rows.
        verbose: no effect.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def __init__(  # noqa: PLR0913 -- Horovod's names
        self,
        *,
        model: Any,
        optimizer: Any,
        loss: Any,
        feature_cols: str | Sequence[str],
        label_cols: str | Sequence[str],
        store: str,
        metrics: Any = None,
        num_proc: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        validation: float = 0.0,
        input_shapes: Sequence[Sequence[int]] | None = None,
        random_seed: int = 0,
        verbose: int = 0,  # noqa: ARG002 -- Horovod's programs pass it
    ) -> None:
        if not isinstance(model, keras.Model):
            raise ArgumentError(f"model={model!r}: want a keras.Model")
        shapes = None if input_shapes is None else tuple(row_shape(shape) for shape in input_shapes)
        super().__init__(
            Columns(names(feature_cols), names(label_cols), shapes),
            store=store,
            num_proc=num_proc,
            batch_size=batch_size,
            epochs=epochs,
            validation=validation,
            seed=random_seed,
        )
        self._parts = pickled((model, optimizer, loss, metrics))

    def _work(self) -> Callable[[EstimatorTraining], Trained | None]:
        return BackendCall(keras.config.backend(), partial(train, self._parts))

    def _made(self, trained: Trained) -> "KerasModel":
        model, *_ = unpickled(self._parts)
        model.set_weights(trained.weights)
        return KerasModel(self._columns, model, trained.history)


class KerasModel(RowModel):
    """The trained model, as a transformer that adds a column LABEL__output of array<double> for each label.

    Args:
        columns: the columns of the training.
        model: the trained model.
        history: the losses and metrics by epoch.
    """

    def __init__(self, columns: Columns, model: Any, history: dict[str, list[float]]) -> None:
        self._model = model
        super().__init__(columns, BackendCall(keras.config.backend(), partial(predictions, model)), history)

    def getModel(self) -> Any:  # noqa: N802 -- Horovod's name
        """Return the trained model."""
        return self._model


def predictions(model: Any, inputs: list[Any]) -> list[Any]:
    """Return an array for each output of a model, for the inputs of some rows."""
    outputs = model.predict(_single(inputs), verbose=0)
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def train(parts: bytes, training: EstimatorTraining) -> Trained | None:
    """Train on this rank. Rank 0 returns the trained model.

    Args:
        parts: the pickled model, optimizer, loss and metrics.
        training: the training.
    """
    import multiring.keras as mk  # noqa: PLC0415 -- the driver does not need it
    from multiring.data import Dataset, Loader  # noqa: PLC0415 -- as above

    mk.init()
    keras.utils.set_random_seed(training.seed)
    model, optimizer, loss, metrics = unpickled(parts)
    model = mk.distribute(model)
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    rows = training.batch_size * mk.size()  # every rank reads the batch, and `fit` divides it
    data = Dataset(training.folder, format="parquet", seed=training.seed, shuffle="windowed")
    loader = Loader(data, rows, rank=0, ranks=1)
    validation = {}
    if training.validation:
        others = Loader(Dataset(training.validation, format="parquet", shuffle="none"), rows, rank=0, ranks=1)
        validation = {
            "validation_data": _batches(others, training.columns),
            "validation_steps": len(others),
        }
    history = model.fit(
        _batches(loader, training.columns),
        steps_per_epoch=len(loader),
        epochs=training.epochs,
        verbose=0,
        **validation,
    )
    found = {name: [float(value) for value in values] for name, values in history.history.items()}
    return Trained(model.get_weights(), found) if mk.rank() == 0 else None


def _batches(loader: Any, columns: Columns) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs and labels of each batch, epoch after epoch."""
    while True:
        for batch in loader:
            labels = [np.asarray(batch[name]) for name in columns.labels]
            yield _single(columns.inputs(batch)), _single(labels)


def _single(values: list[Any]) -> Any:
    """Return one value itself, and several as a tuple, as Keras wants them."""
    return values[0] if len(values) == 1 else tuple(values)
