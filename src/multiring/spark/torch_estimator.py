"""`TorchEstimator`: train a torch model on the rows of a DataFrame. Horovod's name is horovod.spark.torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from multiring.errors import ArgumentError
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


class TorchEstimator(ParquetEstimator):
    """Train a torch model on all ranks of a Spark application.

    Args:
        model: a torch module. It is called with a tensor for each of `feature_cols`, and returns the output, or a tuple
            with an output for each of `label_cols`.
        optimizer: an optimizer of the model's parameters.
        loss: a function of the output and the label, or a sequence with one for each of `label_cols`.
        feature_cols: the columns of the inputs: numbers, arrays of numbers, or Spark's vectors.
        label_cols: the columns of the labels.
        store: a folder or URL that the driver and all hosts see. `fit` writes Parquet there, and removes it at the end.
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
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]],
        feature_cols: str | Sequence[str],
        label_cols: str | Sequence[str],
        store: str,
        num_proc: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        validation: float = 0.0,
        input_shapes: Sequence[Sequence[int]] | None = None,
        random_seed: int = 0,
        verbose: int = 0,  # noqa: ARG002 -- Horovod's programs pass it
    ) -> None:
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
        losses = (loss,) if callable(loss) else tuple(loss)
        if len(losses) != len(self._columns.labels):
            raise ArgumentError(f"{len(losses)} losses for {len(self._columns.labels)} label_cols: want one each")
        self._parts = pickled((model, optimizer, losses))

    def _work(self) -> Callable[[EstimatorTraining], Trained | None]:
        parts = self._parts

        def work(training: EstimatorTraining) -> Trained | None:
            return train(parts, training)

        return work

    def _made(self, trained: Trained) -> "TorchModel":
        model, _, _ = unpickled(self._parts)
        model.load_state_dict(unpickled(trained.weights))
        return TorchModel(self._columns, model, trained.history)


class TorchModel(RowModel):
    """The trained model, as a transformer that adds a column LABEL__output of array<double> for each label.

    Args:
        columns: the columns of the training.
        model: the trained module.
        history: the losses by epoch: `loss`, and `val_loss` with validation.
    """

    def __init__(self, columns: Columns, model: torch.nn.Module, history: dict[str, list[float]]) -> None:
        self._model = model
        super().__init__(columns, _TorchPrediction(model), history)

    def getModel(self) -> torch.nn.Module:  # noqa: N802 -- Horovod's name
        """Return the trained module."""
        return self._model


class _TorchPrediction:
    """The outputs of a model for some rows."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Return an array for each output."""
        self._model.eval()
        with torch.no_grad():
            outputs = self._model(*(_tensor(each, self._model) for each in inputs))
        return [each.numpy() for each in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]


def train(parts: bytes, training: EstimatorTraining) -> Trained | None:
    """Train on this rank. Rank 0 returns the trained model.

    Args:
        parts: the pickled model, optimizer and losses.
        training: the training.
    """
    import multiring.torch as mt  # noqa: PLC0415 -- the driver does not need it
    from multiring.data import Dataset  # noqa: PLC0415 -- as above

    mt.init()
    torch.manual_seed(training.seed)
    model, optimizer, losses = unpickled(parts)
    data = Dataset(training.folder, format="parquet", seed=training.seed, shuffle="windowed")
    model, optimizer, loader = mt.distribute(model, optimizer, mt.DataLoader(data, training.batch_size * mt.size()))
    history: dict[str, list[float]] = {"loss": []}
    for _ in range(training.epochs):
        model.train()
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = _loss_of(model, losses, training, batch)
            loss.backward()
            optimizer.step()
            total += float(loader.global_loss(loss))
        history["loss"].append(total / len(loader))
        if training.validation:
            history.setdefault("val_loss", []).append(_validation_loss(model, losses, training))
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return Trained(pickled(weights), history) if mt.rank() == 0 else None


def _validation_loss(model: Any, losses: Sequence[Any], training: EstimatorTraining) -> float:
    """Return the mean loss of the rows for validation; each rank computes a part."""
    import multiring.torch as mt  # noqa: PLC0415 -- see train
    from multiring.data import Dataset, Loader  # noqa: PLC0415 -- as above

    model.eval()
    data = Dataset(training.validation, format="parquet", shuffle="none")
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in Loader(data, training.batch_size * mt.size(), rank=mt.rank(), ranks=mt.size()):
            rows = len(batch[training.columns.labels[0]])
            sums += torch.tensor([float(_loss_of(model, losses, training, batch)) * rows, rows], dtype=torch.float64)
    total, rows = mt.allreduce(sums, op=mt.Sum, name="validation").tolist()
    return float(total / rows) if rows else float("nan")


def _loss_of(model: Any, losses: Sequence[Any], training: EstimatorTraining, batch: Any) -> Any:
    columns = training.columns
    outputs = model(*(_tensor(each, model) for each in columns.inputs(batch)))
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    labels = [_tensor(batch[name], model) for name in columns.labels]
    return sum(loss(output, label) for loss, output, label in zip(losses, outputs, labels, strict=True))


def _tensor(array: Any, model: Any) -> Any:
    """Return a tensor. Numbers with a fraction get the type of the model's parameters."""
    tensor = torch.as_tensor(array)
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(next(model.parameters()).dtype)
