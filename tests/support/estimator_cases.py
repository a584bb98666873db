"""What the estimators of Spark do with good and bad input, for the driver program of the clusters' tests."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multiring.torch as mt

PLANE = np.array([1.0, -2.0, 0.5])
Case = Callable[[], Any]


def estimator_cases(session: Any) -> dict[str, Case]:
    """Return the cases by name; each returns what the tests look at."""
    frame = _points(session)
    some = [(float(index), float(index)) for index in range(3)]
    few = session.createDataFrame(some, ["x", "target"])
    none = session.createDataFrame([], "x double, target double")
    holes = session.createDataFrame([*some, (None, 1.0)], ["x", "target"])
    texts = session.createDataFrame([("a", 1.0)], ["x", "target"])

    def fit(rows: Any, loss: Any = torch.nn.functional.mse_loss, **options: Any) -> dict[str, Any]:
        with _store() as store:
            made = _torch_estimator(store, 1, loss=loss, **{"feature_cols": ["x"], "epochs": 2, **options}).fit(rows)
            return {"history": made.history}

    return {
        "torch estimator": lambda: _plane(frame, _torch_estimator, "vector"),
        "keras estimator": lambda: _plane(frame, _keras_estimator, "point"),
        "few rows": lambda: fit(few),
        "no rows": lambda: fit(none),
        "no rows for validation": lambda: fit(few, validation=1e-6),
        "no column": lambda: fit(few, feature_cols=["x", "z"]),
        "no value": lambda: fit(holes),
        "texts": lambda: fit(texts),
        "transform without a column": lambda: _transform_without(few),
        "a rank raises": lambda: fit(few, raise_on_rank_1),
        "a rank is killed": lambda: fit(few, kill_rank_1),
        "interrupted": lambda: _interrupted(few),
    }


def raise_on_rank_1(output: Any, label: Any) -> Any:
    """Return a loss, except on rank 1."""
    if mt.rank() == 1:
        raise ZeroDivisionError("rank 1 divides")
    return torch.nn.functional.mse_loss(output, label)


def kill_rank_1(output: Any, label: Any) -> Any:
    """Return a loss, except on rank 1."""
    if mt.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.mse_loss(output, label)


def wait_for_ever(folder: str, output: Any, label: Any) -> Any:
    """Say that the rank computes its loss, and do not return."""
    (Path(folder) / f"at-work-{mt.rank()}").touch()
    time.sleep(4325)
    return output - label


@contextmanager
def _store() -> Iterator[str]:
    """Give a store for a block, and check afterwards that nothing is left in it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        store.mkdir()
        try:
            yield f"file://{store}"
        finally:
            left = list(store.iterdir())
            assert left == []


def _points(session: Any) -> Any:
    """Return points and a plane's height there."""
    from pyspark.ml.linalg import Vectors  # noqa: PLC0415 -- only Spark's driver has it

    points = np.random.default_rng(1).normal(size=(400, 3))
    heights = points @ PLANE + 0.25
    rows = [
        (Vectors.dense(point), point.tolist(), float(height)) for point, height in zip(points, heights, strict=True)
    ]
    return session.createDataFrame(rows, ["vector", "point", "target"]).repartition(2)


def _torch_estimator(store: str, inputs: int = 3, **options: Any) -> Any:
    from multiring.spark.torch_estimator import TorchEstimator  # noqa: PLC0415 -- needs Spark

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(inputs, 1), torch.nn.Flatten(0))
    if inputs == 1:
        net.insert(0, torch.nn.Unflatten(0, (-1, 1)))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"loss": torch.nn.functional.mse_loss, "label_cols": "target", "num_proc": 2, "batch_size": 20, **options}
    return TorchEstimator(model=net, optimizer=sgd, store=store, random_seed=3, **given)


def _keras_estimator(store: str, **options: Any) -> Any:
    import keras  # noqa: PLC0415 -- the other cases do not need it

    from multiring.spark.keras_estimator import KerasEstimator  # noqa: PLC0415 -- needs Spark

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    options |= {"label_cols": "target", "num_proc": 2, "batch_size": 20, "random_seed": 3}
    sgd = keras.optimizers.SGD(0.1)
    return KerasEstimator(model=model, optimizer=sgd, loss="mse", metrics=["mae"], store=store, **options)


def _plane(frame: Any, estimator: Callable[..., Any], feature: str) -> dict[str, Any]:
    """Fit a plane to points, and return the losses and the greatest error of the transformer."""
    with _store() as store:
        made = estimator(store, feature_cols=[feature], epochs=6, validation=0.2).fit(frame)
        outputs = made.transform(frame).select("target", "target__output").collect()
    return {
        "history": made.history,
        "error": max(abs(row["target"] - row["target__output"][0]) for row in outputs),
        "rows": len(outputs),
        "model": type(made.getModel()).__name__,
    }


def _transform_without(frame: Any) -> None:
    with _store() as store:
        _torch_estimator(store, 1, feature_cols=["x"]).fit(frame).transform(frame.drop("x"))


def _interrupted(frame: Any) -> str:
    """Interrupt `fit` while the ranks train, as Ctrl-C does."""
    with _store() as store, tempfile.TemporaryDirectory() as folder:

        def interrupt() -> None:
            while len(list(Path(folder).iterdir())) < 2:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            _torch_estimator(store, 1, feature_cols=["x"], loss=partial(wait_for_ever, folder)).fit(frame)
        except KeyboardInterrupt:
            return "interrupted"
    return "not interrupted"
