"""Learn handwritten digits with flax: `multiring run -n 2 -- python examples/digits_flax.py`.

It trains a module of flax' NNX. multiring wraps an optimizer of optax and combines the ranks' gradients.
"""

import time
from typing import Any

import jax
import optax
from digits_data import batches, digits, options_for, padded_share, result  # type: ignore[import-not-found] # beside this file
from flax import nnx

import multiring.jax as mj


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
    options = options_for("flax")
    mj.init()
    (images, labels), (test_images, test_labels) = digits()
    network = Network(nnx.Rngs(mj.rank()))  # weights differ between ranks until they are broadcast
    nnx.update(network, mj.broadcast(nnx.state(network)))
    # A rank's loss is its samples' part of the whole batch's loss, so the ranks' gradients add up to the gradient.
    transformation: Any = mj.distribute(optax.sgd(0.05, momentum=0.9), op=mj.Sum)
    optimizer = nnx.Optimizer(network, transformation, wrt=nnx.Param)
    start = time.perf_counter()
    for batch in batches(len(labels), options):
        own, weights = padded_share(batch, mj.rank(), mj.size(), options)
        step(network, optimizer, images[own], labels[own], weights)
    jax.block_until_ready(nnx.state(network))
    elapsed_s = time.perf_counter() - start
    images_per_s = options.epochs * len(labels) / elapsed_s
    mj.print_once(result(network(test_images), test_labels, images_per_s, mj.size()))


if __name__ == "__main__":
    main()
