"""Digits with TensorFlow: `multiring run -n 2 -- python examples/digits/with_tensorflow.py`."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from digits_task import MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file

import multiring.tensorflow as mt


class Model:
    """The network, trained by DistributedGradientTape in a compiled step."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = {name: tf.Variable(value) for name, value in weights.items()}
        self._velocity = {name: tf.Variable(tf.zeros_like(value)) for name, value in weights.items()}
        self._compiled = tf.function(self._step)

    def _scores(self, images: Any) -> Any:
        hidden = tf.nn.relu(images @ self._weights["a"] + self._weights["b"])
        return hidden @ self._weights["c"] + self._weights["d"]

    def _step(self, images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self._scores(images))
            loss = tf.reduce_mean(errors)
        gradients = mt.DistributedGradientTape(tape).gradient(loss, list(self._weights.values()))
        for name, gradient in zip(self._weights, gradients, strict=True):
            self._velocity[name].assign(MOMENTUM * self._velocity[name] + gradient)
            self._weights[name].assign_sub(RATE * self._velocity[name])
        return loss

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        return float(self._compiled(tf.constant(images), tf.constant(labels)))

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        return self._scores(tf.constant(images)).numpy()


if __name__ == "__main__":
    main("TensorFlow", mt.init, Model)
