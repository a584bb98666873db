"""Learn handwritten digits with flax: `multiring run -n 2 -- python examples/digits_flax.py`.

It trains a module of flax' NNX. multiring wraps an optimizer of optax and combines the ranks' gradients.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import multiring.jax as mj

HELD_BACK = 360  # test images, a fifth of 1797


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the training set and the test set: images of shape (n, 8, 8, 1), and labels."""
    bunch = load_digits()
    images, labels = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis], bunch.target
    order = np.random.default_rng(2026).permutation(len(labels))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


class Network(nnx.Module):
    """A small convolutional network."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convolutions = nnx.List(
            [nnx.Conv(before, after, (3, 3), rngs=rngs) for before, after in ((1, 32), (32, 64), (64, 64))]
        )
        self.hidden = nnx.Linear(256, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        """Return ten scores for each image."""
        found = images
        for layer, convolution in enumerate(self.convolutions):
            found = nnx.relu(convolution(found))
            found = nnx.max_pool(found, (2, 2), (2, 2)) if layer else found
        return self.out(nnx.relu(self.hidden(found.reshape(-1, 256))))


def loss_of(network: Network, images: Any, labels: Any, weights: Any) -> Any:
    """Return the weighted sum of the images' losses."""
    errors = optax.softmax_cross_entropy_with_integer_labels(network(images), labels)
    return (errors * weights).sum()


@nnx.jit
def step(network: Network, optimizer: Any, images: Any, labels: Any, weights: Any) -> None:
    """Train on one rank's share of a batch."""
    optimizer.update(network, nnx.grad(loss_of)(network, images, labels, weights))


def main() -> None:
    """Train, and print the accuracy and speed."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with flax on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    options = parser.parse_args()
    mj.init()
    (images, labels), (test_images, test_labels) = digits()
    network = Network(nnx.Rngs(mj.rank()))  # weights differ between ranks until they are broadcast
    nnx.update(network, mj.broadcast(nnx.state(network)))
    # A rank's loss is its samples' part of the whole batch's loss, so the ranks' gradients add up to the gradient.
    transformation: Any = mj.distribute(optax.sgd(0.05, momentum=0.9), op=mj.Sum)
    optimizer = nnx.Optimizer(network, transformation, wrt=nnx.Param)
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
            step(network, optimizer, images[own], labels[own], weights)
    jax.block_until_ready(nnx.state(network))
    elapsed_s = time.perf_counter() - start
    accuracy = float(np.mean(np.argmax(network(test_images), axis=1) == test_labels))
    mj.print_once(
        f"test accuracy {accuracy:.2%}, {options.epochs * len(labels) / elapsed_s:.0f} images/s, "
        f"{mj.size()} rank{'s' if mj.size() > 1 else ''}"
    )


if __name__ == "__main__":
    main()
