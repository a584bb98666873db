"""Digits with Keras: `multiring run -n 2 -- python examples/digits/with_keras.py`; KERAS_BACKEND names its backend."""

from collections.abc import Mapping
from typing import Any

import keras
from digits_task import MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file

import multiring.keras as mk


class Model:
    """The network, trained by DistributedOptimizer and `train_on_batch`."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        hidden = keras.layers.Dense(128, activation="relu")
        self._net = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
        self._net.set_weights([weights[name] for name in "abcd"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._net.compile(mk.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM)), loss)

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        self._net.reset_metrics()  # otherwise the loss is a mean over steps
        return float(self._net.train_on_batch(images, labels))

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        return self._net.predict(images, verbose=0)


if __name__ == "__main__":
    main(f"Keras on {keras.backend.backend()}", mk.init, Model)
