"""What the estimators share: write a DataFrame's columns as Parquet, train on all ranks, and apply a model to rows.

Only the modules of the estimators import this module, because it imports Spark.
"""

import pickle
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from pyspark.ml import Estimator, Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.functions import col, count, lit, pandas_udf, struct
from pyspark.sql.types import ArrayType, BooleanType, DecimalType, NumericType

from multiring.errors import ArgumentError
from multiring.spark.running import START_S, run

OUTPUT = "__output"  # Horovod's ending of the columns with a model's outputs


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a training.

    - features: each is one input of the model.
    - labels: each is the target of one output of the model.
    - shapes: the shape of each input of one row, or None for the shape as stored.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None

    def all(self) -> tuple[str, ...]:
        """Return the names of the columns; a column may be both a feature and a label."""
        return tuple(dict.fromkeys((*self.features, *self.labels)))

    def inputs(self, batch: Any) -> list[Any]:
        """Return the inputs in a batch, a mapping of columns to arrays with the samples on their first axis."""
        found = [np.asarray(batch[name]) for name in self.features]
        if self.shapes is None:
            return found
        return [each.reshape(len(each), *shape) for each, shape in zip(found, self.shapes, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorTraining:
    """What each rank trains.

    - folder, validation: URLs of Parquet folders; `validation` may be empty.
    - batch_size: the number of rows of a step on each rank.
    """

    columns: Columns
    folder: str
    validation: str
    batch_size: int
    epochs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model: its weights in the framework's own form, and its losses by epoch."""

    weights: Any
    history: dict[str, list[float]] = field(default_factory=dict)


class ParquetEstimator(Estimator):  # type: ignore[misc] # mypy does not see Spark's types
    """An estimator that trains on the rows of a DataFrame.

    Args:
        columns: the columns of the training.
        store: a folder or URL that the driver and all hosts see, such as `hdfs://...`. `fit` writes Parquet there,
            and removes it at the end.
        num_proc: the number of ranks. Default: `spark.default.parallelism`.
        batch_size: the number of rows of a step on each rank.
        epochs: how often to use each row.
        validation: the fraction of the rows that are left out of the training, to compute a loss of them.
        seed: of the order of the rows, and of the choice for `validation`.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def __init__(  # noqa: PLR0913 -- what a training needs
        self,
        columns: Columns,
        *,
        store: str,
        num_proc: int | None,
        batch_size: int,
        epochs: int,
        validation: float,
        seed: int,
    ) -> None:
        super().__init__()
        if not columns.features or not columns.labels:
            raise ArgumentError(f"feature_cols={columns.features}, label_cols={columns.labels}: want at least one each")
        if columns.shapes is not None and len(columns.shapes) != len(columns.features):
            raise ArgumentError(
                f"{len(columns.shapes)} input_shapes for {len(columns.features)} feature_cols: want one each"
            )
        if batch_size < 1 or epochs < 1:
            raise ArgumentError(f"batch_size={batch_size}, epochs={epochs}: want 1 or more")
        if not 0 <= validation < 1:
            raise ArgumentError(f"validation={validation}: want a fraction of the rows, 0 or more and below 1")
        if not store:
            raise ArgumentError("store='': want a folder or URL that the driver and all hosts see")
        self._columns, self._store, self._num_proc = columns, store.rstrip("/"), num_proc
        self._batch_size, self._epochs, self._validation, self._seed = batch_size, epochs, validation, seed

    @abstractmethod
    def _work(self) -> Callable[[EstimatorTraining], Trained | None]:
        """Return the function that every rank calls. Rank 0 returns the trained model, and other ranks None."""

    @abstractmethod
    def _made(self, trained: Trained) -> Any:
        """Return the transformer with the trained model."""

    def _fit(self, dataset: Any) -> Any:
        """Train, and return the transformer. Spark's `fit` calls it."""
        check_columns(dataset, self._columns.all())
        place = f"{self._store}/multiring-{secrets.token_hex(8)}"
        try:
            validation = self._write(dataset, place)
            training = EstimatorTraining(
                columns=self._columns,
                folder=f"{place}/train",
                validation=validation,
                batch_size=self._batch_size,
                epochs=self._epochs,
                seed=self._seed,
            )
            (trained, *_) = run(self._work(), self._num_proc, (training,), start_timeout_s=START_S)
        finally:
            _remove(dataset.sparkSession, place)
        return self._made(trained)

    def _write(self, dataset: Any, place: str) -> str:
        """Write the columns as Parquet, and return the folder for validation, which may be empty."""
        rows = dataset.select(*(_plain(dataset, name) for name in self._columns.all()))
        if not self._validation:
            self._write_part(rows, f"{place}/train", "the DataFrame has no rows")
            return ""
        validation = f"{place}/validation"
        rows, others = rows.randomSplit([1 - self._validation, self._validation], self._seed)
        left = f"with validation={self._validation}, no rows are left"
        self._write_part(rows, f"{place}/train", f"{left} to train on: want more rows, or a smaller fraction")
        self._write_part(
            others, validation, f"{left} for val_loss: want more rows, a greater fraction, or validation=0"
        )
        return validation

    def _write_part(self, rows: Any, folder: str, problem: str) -> None:
        """Write some rows as Parquet, and check the values that no model can be trained on.

        Raises:
            ArgumentError: there are no rows (the text is `problem`), or a value is missing.
        """
        rows.write.parquet(folder)
        written = rows.sparkSession.read.parquet(folder)
        counts = written.agg(count(lit(1)), *(count(col(f"`{name}`")) for name in self._columns.all())).head()
        if counts[0] == 0:
            raise ArgumentError(problem)
        for name, present in zip(self._columns.all(), counts[1:], strict=True):
            if present < counts[0]:
                raise ArgumentError(
                    f"column {name!r} has no value in {counts[0] - present} of {counts[0]} rows: fill them in, or drop "
                    f"these rows, as by frame.dropna(subset=[{name!r}])"
                )


class RowModel(Model):  # type: ignore[misc] # as above
    """A transformer that adds a column for each output of a model.

    Args:
        columns: the columns of the training.
        predict: takes the inputs of some rows, and returns an array for each output, with the rows on the first axis.
        history: the losses by epoch: `loss`, and `val_loss` with validation.
    """

    def __init__(
        self, columns: Columns, predict: Callable[[list[Any]], list[Any]], history: dict[str, list[float]]
    ) -> None:
        super().__init__()
        self._columns, self._predict, self.history = columns, predict, history

    def _transform(self, dataset: Any) -> Any:
        """Return the DataFrame with a column LABEL__output of array<double> for each label. Spark calls it."""
        check_columns(dataset, self._columns.features)
        inputs = struct(*(_plain(dataset, name) for name in self._columns.features))
        for index, label in enumerate(self._columns.labels):
            outputs = pandas_udf(_predictor(self._columns, self._predict, index), "array<double>")
            dataset = dataset.withColumn(f"{label}{OUTPUT}", outputs(inputs))
        return dataset


def _predictor(columns: Columns, predict: Callable[[list[Any]], list[Any]], index: int) -> Callable[..., Any]:
    """Return a function of a pandas DataFrame of features, which returns a Series of lists."""
    import pandas as pd  # noqa: PLC0415 -- Spark needs it for such functions only

    def outputs(rows: pd.DataFrame) -> pd.Series:
        stacked = {name: np.stack([np.asarray(value) for value in rows[name]]) for name in columns.features}
        found = predict(columns.inputs(stacked))[index]
        return pd.Series([np.asarray(each, np.float64).reshape(-1) for each in found])

    return outputs


def check_columns(dataset: Any, columns: Sequence[str]) -> None:
    """Check that a DataFrame has columns, with numbers in them.

    Raises:
        ArgumentError: a column is missing, or has another type.
    """
    for name in columns:
        if name not in dataset.columns:
            raise ArgumentError(f"the DataFrame has no column {name!r}; want one of {', '.join(dataset.columns)}")
        kind = dataset.schema[name].dataType
        while isinstance(kind, ArrayType):
            kind = kind.elementType
        if not isinstance(kind, (NumericType, BooleanType, VectorUDT)) or isinstance(kind, DecimalType):
            raise ArgumentError(
                f"column {name!r} has the type {dataset.schema[name].dataType.simpleString()}; want numbers, arrays of "
                "numbers, or vectors: convert the column first, as by cast('double')"
            )


def _plain(dataset: Any, name: str) -> Any:
    """Return a column, with Spark's vectors as arrays."""
    if isinstance(dataset.schema[name].dataType, VectorUDT):
        return vector_to_array(dataset[name]).alias(name)
    return dataset[name]


def _remove(session: Any, place: str) -> None:
    """Remove a folder by Spark's own file systems, which know every URL that Spark has written to."""
    path = session._jvm.org.apache.hadoop.fs.Path(place)  # noqa: SLF001 -- Spark has no public name for it
    path.getFileSystem(session._jsc.hadoopConfiguration()).delete(path, True)  # noqa: SLF001 -- as above


def pickled(value: Any) -> bytes:
    """Return `value` as bytes; a model, its optimizer and its loss in one pickle keep referring to each other."""
    return bytes(import_module("cloudpickle").dumps(value))


def unpickled(data: bytes) -> Any:
    """Return the value in bytes from `pickled`."""
    return pickle.loads(data)  # noqa: S301 -- from `pickled`, by the same application


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one row's input; Horovod's programs put -1 before it, for the rows of a batch."""
    return tuple(shape[1:] if shape[:1] in ([-1], (-1,)) else shape)


def names(columns: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (columns,) if isinstance(columns, str) else tuple(columns)
