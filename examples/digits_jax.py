"""Learn handwritten digits with JAX and optax: `multiring run -n 2 -- python examples/digits_jax.py`.

There is one compiled step: each rank has its share of every batch, and the optimizer uses the gradients of all ranks.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import multiring.jax as mj

HELD_BACK = 360  # test images, a fifth of 1797
SHAPES = {
    "conv1": (3, 3, 1, 32),
    "conv2": (3, 3, 32, 64),
    "conv3": (3, 3, 64, 64),
    "hidden": (256, 128),
    "out": (128, 10),
}


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the training set and the test set: images of shape (n, 8, 8, 1), and labels."""
    bunch = load_digits()
    images, labels = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis], bunch.target
    order = np.random.default_rng(2026).permutation(len(labels))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


def first_parameters(seed: int) -> Any:
    """Return the initial parameters of a small convolutional network."""
    random = np.random.default_rng(seed)
    return {
        name: {
            "weight": (random.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))).astype(np.float32),
            "bias": np.zeros(shape[-1], np.float32),
        }
        for name, shape in SHAPES.items()
    }


def network(parameters: Any, images: Any) -> Any:
    """Return ten scores for each image."""
    found = images
    for layer in ("conv1", "conv2", "conv3"):
        weight, bias = parameters[layer]["weight"], parameters[layer]["bias"]
        found = jax.lax.conv_general_dilated(found, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        found = jax.nn.relu(found + bias)
        if layer != "conv1":
            found = jax.lax.reduce_window(found, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    found = found.reshape(-1, 256)
    found = jax.nn.relu(found @ parameters["hidden"]["weight"] + parameters["hidden"]["bias"])
    return found @ parameters["out"]["weight"] + parameters["out"]["bias"]


def loss_of(parameters: Any, images: Any, labels: Any, weights: Any) -> Any:
    """Return the weighted sum of the images' losses."""
    errors = optax.softmax_cross_entropy_with_integer_labels(network(parameters, images), labels)
    return (errors * weights).sum()


def main() -> None:
    """Train, and print the accuracy and speed."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with JAX on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    options = parser.parse_args()
    mj.init()
    (images, labels), (test_images, test_labels) = digits()
    parameters = mj.broadcast(first_parameters(mj.rank()))  # they differ between ranks until now
    # A rank's loss is its samples' part of the whole batch's loss, so the ranks' gradients add up to the gradient.
    optimizer = mj.distribute(optax.sgd(0.05, momentum=0.9), op=mj.Sum)
    state = optimizer.init(parameters)

    def step(parameters: Any, state: Any, images: Any, labels: Any, weights: Any) -> Any:
        gradients = jax.grad(loss_of)(parameters, images, labels, weights)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    share = -(-options.batch // mj.size())  # one shape for one compiled program: padding has weight 0
    random = np.random.default_rng(1)  # the same order on all ranks
    start = time.perf_counter()
    for _ in range(options.epochs):
        order = random.permutation(len(labels))
        for first in range(0, len(order), options.batch):
            batch = order[first : first + options.batch]
            own = batch[mj.rank() :: mj.size()]
            weights = np.zeros(share, np.float32)
            weights[: len(own)] = 1 / len(batch)
            own = np.resize(own, share) if len(own) else np.zeros(share, int)
            parameters, state = compiled(parameters, state, images[own], labels[own], weights)
    jax.block_until_ready(parameters)
    elapsed_s = time.perf_counter() - start
    accuracy = float(np.mean(np.argmax(network(parameters, test_images), axis=1) == test_labels))
    mj.print_once(
        f"test accuracy {accuracy:.2%}, {options.epochs * len(labels) / elapsed_s:.0f} images/s, "
        f"{mj.size()} rank{'s' if mj.size() > 1 else ''}"
    )


if __name__ == "__main__":
    main()
