"""Digits with NumPy and scikit-learn, by `Group` alone: `multiring run -n 2 -- python examples/digits/with_numpy.py`.

It uses no framework: the gradients are written out, and the ranks average them in memory that they share. Then
scikit-learn trains a classifier batch by batch, and the ranks average its coefficients.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from digits_task import MOMENTUM, RATE, digits, main  # type: ignore[import-not-found] # beside this file
from sklearn.linear_model import SGDClassifier

import multiring


class Model:
    """The network, its gradients, and gradient descent with momentum."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._group = multiring.world()
        self._weights = {name: value.copy() for name, value in weights.items()}
        # All gradients are in one array, which the ranks of a host reduce in place: one collective per step.
        flat = self._group.allocate(sum(value.size for value in weights.values()), np.float32)
        ends = np.cumsum([value.size for value in weights.values()])[:-1]
        parts = zip(weights.items(), np.split(flat, ends), strict=True)
        self._flat = flat
        self._gradients = {name: part.reshape(value.shape) for (name, value), part in parts}
        self._velocity = {name: np.zeros_like(value) for name, value in weights.items()}

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        held = self._weights
        hidden = np.maximum(images @ held["a"] + held["b"], 0)
        scores = hidden @ held["c"] + held["d"]
        powers = np.exp(scores - scores.max(1, keepdims=True))
        found = powers / powers.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        loss = float(-np.log(found[rows, labels]).mean())
        found[rows, labels] -= 1
        found /= len(labels)
        behind = (found @ held["c"].T) * (hidden > 0)
        own = {"a": images.T @ behind, "b": behind.sum(0), "c": hidden.T @ found, "d": found.sum(0)}
        for name, gradient in own.items():
            self._gradients[name][...] = gradient
        self._group.all_reduce(self._flat, "average")
        for name, gradient in self._gradients.items():
            self._velocity[name] = MOMENTUM * self._velocity[name] + gradient
            held[name] -= RATE * self._velocity[name]
        return loss

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        hidden = np.maximum(images @ self._weights["a"] + self._weights["b"], 0)
        return hidden @ self._weights["c"] + self._weights["d"]


def linear(epochs: int = 10) -> float:
    """Train scikit-learn's linear classifier on each rank's share; average after each epoch; return its accuracy."""
    (images, labels), (test_images, test_labels) = digits()
    group = multiring.world()
    classifier = SGDClassifier(loss="log_loss", random_state=group.rank)
    for _ in range(epochs):
        classifier.partial_fit(images[group.rank :: group.size], labels[group.rank :: group.size], range(10))
        group.all_reduce(classifier.coef_, "average")
        group.all_reduce(classifier.intercept_, "average")
    return float(classifier.score(test_images, test_labels))


if __name__ == "__main__":
    main("NumPy", multiring.init, Model)
    found = linear()
    if multiring.rank() == 0:
        print(f"scikit-learn: test accuracy {found:.2%}")
