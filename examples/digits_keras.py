"""Learn handwritten digits with Keras: `multiring run -n 2 -- python examples/digits_keras.py`.

It is a script for one process with one added line, `mk.distribute(model)`, on any backend that KERAS_BACKEND names.
One rank has the same losses.
"""

import argparse
import time
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import multiring.keras as mk

HELD_BACK = 360  # test images, a fifth of 1797


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the training set and the test set: images of shape (n, 8, 8, 1), and labels."""
    bunch = load_digits()
    images, labels = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis], bunch.target
    order = np.random.default_rng(2026).permutation(len(labels))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


def network() -> Any:
    """Return a small convolutional network."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.Conv2D(64, 3, padding="same")),
            *(layers.ReLU(), layers.MaxPooling2D(2), layers.Conv2D(64, 3, padding="same", activation="relu")),
            *(layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)),
        ]
    )


def main() -> None:
    """Train, and print the accuracy and speed."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with Keras on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    options = parser.parse_args()
    mk.init()
    keras.utils.set_random_seed(1)
    (images, labels), held_back = digits()
    model = mk.distribute(network())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    start = time.perf_counter()
    history = model.fit(images, labels, batch_size=options.batch, epochs=options.epochs, verbose=2)
    elapsed_s = time.perf_counter() - start
    _, accuracy = model.evaluate(*held_back, verbose=0)
    seen = len(images) * len(history.history["loss"])
    ranks = f"{mk.size()} rank{'s' if mk.size() > 1 else ''}"
    mk.print_once(
        f"test accuracy {accuracy:.2%}, {seen / elapsed_s:.0f} images/s, {ranks}, Keras on {keras.backend.backend()}"
    )


if __name__ == "__main__":
    main()
