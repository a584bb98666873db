"""Learn handwritten digits with Keras: `multiring run -n 2 -- python examples/digits_keras.py`.

It is a script for one process with one added line, `mk.distribute(model)`, on any backend that KERAS_BACKEND names.
One rank has the same losses.
"""

import time
from typing import Any

import keras
from digits_data import digits, options_for  # type: ignore[import-not-found] # beside this file

import multiring.keras as mk


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
    options = options_for("Keras")
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
