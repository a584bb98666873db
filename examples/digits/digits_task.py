"""One task for every framework: handwritten digits, a network of two layers, and its initial weights.

Each example beside this file implements `Model` in its framework, and calls `main`. All use the same data, weights
and batches, so that their losses are comparable step by step.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import multiring

Array = NDArray[Any]

HELD_BACK = 360  # test images, a fifth of 1797
BATCH = 96  # images per step, of all ranks together: 1, 2, 3 and 4 ranks get equal shares
RATE, MOMENTUM = 0.1, 0.9
EPOCHS = 20


class Model(Protocol):
    """The interface of an example: a network that starts with `weights`, and gradient descent with momentum.

    velocity = MOMENTUM * velocity + gradient; weight = weight - RATE * velocity
    """

    def step(self, images: Array, labels: Array) -> float:
        """Take a step with the average of all ranks' gradients; return this rank's mean loss before the step."""

    def scores(self, images: Array) -> Array:
        """Return ten scores for each image."""


def digits() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the training set and the test set: images of shape (n, 64), and labels."""
    bunch = load_digits()
    images, labels = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = np.random.default_rng(2026).permutation(len(labels))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


def weights() -> dict[str, Array]:
    """Return the network's initial weights: scores = relu(images @ a + b) @ c + d."""
    random = np.random.default_rng(1)
    return {
        "a": (random.standard_normal((64, 128)) * np.sqrt(2 / 64)).astype(np.float32),
        "b": np.zeros(128, np.float32),
        "c": (random.standard_normal((128, 10)) * np.sqrt(2 / 128)).astype(np.float32),
        "d": np.zeros(10, np.float32),
    }


def train(model: Model, epochs: int = EPOCHS, steps: int | None = None) -> list[float]:
    """Train on this rank's share of each batch; return the losses of whole batches. `steps` limits their number."""
    (images, labels), _ = digits()
    random = np.random.default_rng(3)  # the same order on all ranks
    group = multiring.world()
    losses: list[float] = []
    for _ in range(epochs):
        order = random.permutation(len(labels))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            own = order[first : first + BATCH][group.rank :: group.size]
            loss = np.array([model.step(images[own], labels[own])])
            group.all_reduce(loss, "average")
            losses.append(float(loss[0]))
            if len(losses) == steps:
                return losses
    return losses


def accuracy(model: Model) -> float:
    """Return the share of test images that the model classifies correctly."""
    _, (images, labels) = digits()
    return float((np.asarray(model.scores(images)).argmax(1) == labels).mean())


def main(framework: str, init: Callable[[], object], make: Callable[[Mapping[str, Array]], Model]) -> None:
    """Train, and print the accuracy and speed."""
    parser = argparse.ArgumentParser(description=f"Learn handwritten digits with {framework} on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    init()
    model = make(weights())
    start = time.perf_counter()
    steps = len(train(model, options.epochs))
    elapsed_s = time.perf_counter() - start
    if multiring.rank() == 0:
        ranks = f"{multiring.size()} rank{'s' if multiring.size() > 1 else ''}"
        speed = steps * BATCH / elapsed_s
        print(f"{framework}: test accuracy {accuracy(model):.2%}, {speed:.0f} images/s, {ranks}")
