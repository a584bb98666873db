"""Define random Keras programs for benchmarks/evidence/keras/main.py.

The same program runs on several ranks and in one process. This module does not import multiring; the caller passes the
function that makes a model distributed. Results are plain values, so the results of two processes can be compared.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
from benchmarks.evidence.keras.steps import GAN, OwnStep, recording

Random = np.random.Generator
Result = dict[str, Any]
WEIGHTS = ("float-weights", "integer-weights", "class-weight", "mean-weights", "weighted-metrics")
SOURCES = ("dataset", "pydataset", "generator", "loader")
KINDS = ("masks", "two-outputs", "batch-norm", "own-step", "add-loss")
OTHERS = ("sum", "state-metrics", "clip", "accumulate", "ema", "l2", "validation", "steps")


@dataclass
class Api:
    """The functions that a program gets from its caller.

    The defaults are those of a single process.
    """

    distribute: Callable[[Any], Any] = lambda model: model
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    rank: int = 0
    size: int = 1


@dataclass
class Data:
    """The samples of a program, and the form in which `fit` gets them."""

    x: Any
    y: Any
    weights: Any = None
    batch: int = 8
    source: str = "arrays"
    options: dict[str, Any] = field(default_factory=dict)

    def given(self, *, endless: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for `fit` or `evaluate`."""
        parts = tuple(each for each in (self.x, self.y, self.weights) if each is not None)
        if self.source == "arrays":
            return (self.x, self.y), {"batch_size": self.batch, "sample_weight": self.weights}
        rows = len(keras.tree.flatten(self.x)[0])
        starts = range(0, rows, self.batch)

        def cut(start: int) -> Any:
            return keras.tree.map_structure(lambda each: each[start : start + self.batch], parts)

        if self.source == "dataset":
            return (_dataset(parts, self.batch),), {}
        if self.source == "pydataset":
            return (_py_dataset(cut, starts),), {}

        def batches() -> Iterator[Any]:
            while True:
                for start in starts:
                    yield cut(start)
                if not endless:
                    return

        return (batches(),), {"steps_per_epoch" if endless else "steps": len(starts)}


def _py_dataset(cut: Callable[[int], Any], starts: Sequence[int]) -> Any:
    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(starts)

        def __getitem__(self, index: int) -> Any:
            return cut(starts[index])

    return Batches()


def _dataset(parts: Any, batch: int) -> Any:
    import tensorflow as tf  # noqa: PLC0415 -- slow

    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


def _loader(parts: Any, batch: int) -> Any:
    import torch  # noqa: PLC0415 -- slow

    tensors = [torch.from_numpy(np.asarray(each)) for each in parts]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch)


def drawn_features(random: Random, backend: str) -> list[str]:
    """Return up to three unusual features that a random program can combine."""
    sources = {"tensorflow": ("dataset", "pydataset", "generator"), "torch": ("pydataset", "generator", "loader")}
    groups = [
        WEIGHTS,
        sources.get(backend, ("pydataset", "generator")),
        KINDS,
        [each for each in OTHERS if each != "steps" or backend != "torch"],
    ]
    count = int(random.choice([0, 1, 2, 3], p=[0.1, 0.6, 0.2, 0.1]))
    chosen = random.permutation(len(groups))[:count]
    found = sorted(str(random.choice(list(groups[place]))) for place in chosen)
    weighs = {"class-weight", "mean-weights", *WEIGHTS} & set(found)
    if "two-outputs" in found and weighs | {"state-metrics"} & set(found):
        found.remove("two-outputs")
    if "masks" in found and weighs | {"state-metrics"} & set(found):
        found.remove("masks")
    if "class-weight" in found and {"generator", "loader"} & set(found):
        found.remove("class-weight")
    return found


def train(random: Random, api: Api, features: Sequence[str]) -> Result:
    """Create a model, train it and evaluate it.

    Returns:
        Histories, weights, and the results of evaluation and prediction.
    """
    keras.utils.set_random_seed(int(random.integers(1 << 30)))
    model, data, loss, metrics = _model_and_data(random, features)
    _set_weights(random, model)
    options: dict[str, Any] = {"metrics": metrics}
    if "weighted-metrics" in features:
        options["weighted_metrics"] = [keras.metrics.SparseCategoricalAccuracy(name="weighted")]
    if "steps" in features:
        options["steps_per_execution"] = 2
    model = api.distribute(model)
    model.compile(_optimizer(random, features), loss, **options)
    fit: dict[str, Any] = {"epochs": int(random.integers(1, 4)), "shuffle": False, "verbose": 0, **data.options}
    held = int(random.integers(3, 12))
    if "validation" in features:
        cut = keras.tree.map_structure(lambda each: each[:held], (data.x, data.y))
        fit |= {"validation_data": cut}
    given, more = data.given(endless=True)
    history = model.fit(*given, **more, **fit).history
    given, more = data.given()
    evaluated = model.evaluate(*given, **more, verbose=0, return_dict=True)
    predicted = model.predict(data.x, batch_size=data.batch, verbose=0)
    return {
        "history": {name: [float(each) for each in values] for name, values in history.items()},
        "evaluate": {name: float(value) for name, value in evaluated.items()},
        "predict": [float(np.abs(each).sum()) for each in keras.tree.flatten(predicted)],
        "weights": [np.asarray(each, np.float64).tolist() for each in model.get_weights()],
    }


def structures(random: Random, api: Api, features: Sequence[str]) -> Result:
    """Train a model whose `train_step` records its input.

    It records the structure, the types, and the shapes without the rows.
    """
    del features
    rows, batch = int(random.integers(5, 30)), int(random.integers(2, 9))
    nested = int(random.integers(0, 4))
    one = random.normal(size=(rows, 3)).astype(np.float32)
    x: Any = (one, {"a": one, "b": one[:, :1]}, (one, one[:, :2]), [one, one])[nested]
    y = (None, one[:, :1], {"u": one[:, :1], "v": one[:, 1:2]})[int(random.integers(0, 3))]
    weights = (
        random.integers(1, 4, rows) if y is not None and not isinstance(y, dict) and random.random() < 0.5 else None
    )
    backend = keras.backend.backend()
    sources = ["arrays", "pydataset", *({"tensorflow": ["dataset"]}.get(backend, []))]
    source = str(random.choice(sources))
    if source != "arrays" and isinstance(x, list):
        x = tuple(x)
    noted: list[str] = []
    model = api.distribute(recording(noted))
    model.compile(keras.optimizers.SGD(0.1))
    given, more = Data(x, y, weights, batch, source).given()
    more.pop("steps", None)
    model.fit(*given, **more, epochs=1, shuffle=False, verbose=0)
    return {"structure": noted[-1], "weights": [np.asarray(each, np.float64).tolist() for each in model.get_weights()]}


def gans(random: Random, api: Api, features: Sequence[str]) -> Result:
    """Train two networks with two optimizers.

    The optimizers are attributes of the model, in a list, or hidden in a function.
    """
    del features
    keras.utils.set_random_seed(int(random.integers(1 << 30)))
    rows, batch = int(random.integers(9, 40)), int(random.integers(3, 9))
    width = int(random.integers(2, 6))
    model = GAN(width, str(random.choice(["attributes", "list", "outside"])))
    _set_weights(random, model)
    model = api.distribute(model)
    model.compile_two(*(keras.optimizers.SGD(float(random.uniform(0.01, 0.2))) for _ in range(2)))
    real = random.normal(size=(rows, width)).astype(np.float32)
    history = model.fit(real, batch_size=batch, epochs=2, verbose=0, shuffle=False).history
    return {
        "history": {name: [float(each) for each in values] for name, values in history.items()},
        "weights": [np.asarray(each, np.float64).tolist() for each in model.get_weights()],
    }


def digest(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _set_weights(random: Random, model: Any) -> None:
    model.set_weights(
        [
            each if "moving" in variable.path else (random.normal(size=each.shape) * 0.4).astype(each.dtype)
            for each, variable in zip(model.get_weights(), model.weights, strict=True)
        ]
    )


def _optimizer(random: Random, features: Sequence[str]) -> Any:
    options: dict[str, Any] = {}
    if "clip" in features:
        options |= {str(random.choice(["clipnorm", "global_clipnorm", "clipvalue"])): float(random.uniform(0.05, 0.5))}
    if "accumulate" in features:
        options["gradient_accumulation_steps"] = 2
    if "ema" in features:
        options |= {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
    rate = float(random.uniform(0.01, 0.1)) * (0.1 if "sum" in features else 1.0)
    kinds = (
        lambda: keras.optimizers.SGD(rate, **options),
        lambda: keras.optimizers.SGD(rate, momentum=0.8, **options),
        lambda: keras.optimizers.Adam(rate, epsilon=0.05, **options),
    )
    return kinds[int(random.integers(len(kinds)))]()


class Penalty(keras.layers.Layer):  # type: ignore[misc]
    """A layer that adds the mean of its squared inputs to the loss."""

    def call(self, inputs: Any) -> Any:
        """Return the inputs unchanged."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def _model_and_data(random: Random, features: Sequence[str]) -> tuple[Any, Data, Any, list[Any]]:
    classes, width = int(random.integers(2, 5)), int(random.integers(2, 7))
    batch = int(random.integers(5, 14))
    rows = batch * int(random.integers(1, 4)) + int(random.integers(0 if "batch-norm" not in features else 4, batch))
    reduction = "sum" if "sum" in features else "sum_over_batch_size"
    reduction = "mean_with_sample_weight" if "mean-weights" in features else reduction
    crossed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    source = next((each for each in features if each in SOURCES), "arrays")
    units = int(random.integers(3, 9))
    if "masks" in features:
        tokens = random.integers(1, 12, size=(rows, 6))
        tokens[np.arange(6)[None, :] > random.integers(0, 6, size=rows)[:, None]] = 0
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(12, units, mask_zero=True),
                keras.layers.Dense(12),
            ]
        )
        return (
            model,
            Data(tokens.astype(np.int32), np.roll(tokens, -1, 1).astype(np.int32), None, batch, source),
            crossed,
            [],
        )
    x = random.normal(size=(rows, width)).astype(np.float32)
    y = random.integers(0, classes, rows).astype(np.int32)
    inputs = keras.Input((width,))
    found = keras.layers.Dense(
        units,
        activation=str(random.choice(["tanh", "softplus"])),
        kernel_regularizer="l2" if "l2" in features else None,
    )(inputs)
    if "batch-norm" in features:
        found = keras.layers.BatchNormalization(momentum=0.7)(found)
    if "add-loss" in features:
        found = Penalty()(found)
    if "two-outputs" in features:
        outputs = {"a": keras.layers.Dense(classes, name="a")(found), "b": keras.layers.Dense(1, name="b")(found)}
        squared = keras.losses.MeanSquaredError(reduction=reduction)
        data = Data(x, {"a": y, "b": x[:, :1]}, None, batch, source)
        return keras.Model(inputs, outputs), data, {"a": crossed, "b": squared}, []
    state = "state-metrics" in features
    final = keras.layers.Dense(1, activation="sigmoid") if state else keras.layers.Dense(classes)
    kind = OwnStep if "own-step" in features else keras.Model
    model = kind(inputs, final(found))
    weights = {
        "float-weights": random.uniform(0.1, 3.0, rows).astype(np.float32),
        "weighted-metrics": random.uniform(0.1, 3.0, rows).astype(np.float32),
        "mean-weights": random.uniform(0.1, 3.0, rows).astype(np.float32),
        "integer-weights": random.integers(1, 4, rows).astype(random.choice(["int64", "int32", "uint8"])),
    }
    given = next((weights[each] for each in features if each in weights), None)
    data = Data(x, (y > 0).astype(np.int32) if state else y, given, batch, source)
    if "class-weight" in features:
        data.options["class_weight"] = {place: float(random.uniform(0.3, 3.0)) for place in range(classes)}
    if state:
        data.y = data.y[:, None]
        pool = [keras.metrics.AUC(num_thresholds=20, name="auc"), keras.metrics.Precision(name="precision")]
        pool += [keras.metrics.Recall(name="recall"), keras.metrics.F1Score(threshold=0.5, average="micro", name="f1")]
        metrics = [pool[place] for place in random.permutation(len(pool))[:2]]
        return model, data, keras.losses.BinaryCrossentropy(reduction=reduction), metrics
    return model, data, crossed, ["accuracy"]
