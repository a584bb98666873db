"""Learn handwritten digits with JAX and optax: `multiring run -n 2 -- python examples/digits_jax.py`.

There is one compiled step: each rank has its share of every batch, and the optimizer uses the gradients of all ranks.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_data import batches, digits, options_for, padded_share, result  # type: ignore[import-not-found] # beside this file

import multiring.jax as mj

SHAPES = {
    "conv1": (3, 3, 1, 32),
    "conv2": (3, 3, 32, 64),
    "conv3": (3, 3, 64, 64),
    "hidden": (256, 128),
    "out": (128, 10),
}


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
    options = options_for("JAX")
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
    start = time.perf_counter()
    for batch in batches(len(labels), options):
        own, weights = padded_share(batch, mj.rank(), mj.size(), options)
        parameters, state = compiled(parameters, state, images[own], labels[own], weights)
    jax.block_until_ready(parameters)
    elapsed_s = time.perf_counter() - start
    images_per_s = options.epochs * len(labels) / elapsed_s
    mj.print_once(result(network(parameters, test_images), test_labels, images_per_s, mj.size()))


if __name__ == "__main__":
    main()
