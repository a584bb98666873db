"""The data, the batches and the options that the examples of JAX, flax, Keras and TensorFlow share."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

HELD_BACK = 360  # test images, a fifth of 1797


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the training set and the test set: images of shape (n, 8, 8, 1), and labels."""
    bunch = load_digits()
    images, labels = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis], bunch.target
    order = np.random.default_rng(2026).permutation(len(labels))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


def batches(images: int, options: argparse.Namespace) -> Iterator[Any]:
    """Return the indices of each batch of all epochs, in the same order on all ranks."""
    random = np.random.default_rng(1)
    for _ in range(options.epochs):
        order = random.permutation(images)
        for first in range(0, images, options.batch):
            yield order[first : first + options.batch]


def padded_share(batch: Any, rank: int, ranks: int, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the indices of a rank's share of a batch, and the weights of its images in the batch's mean loss.

    All shares have one length, for one compiled program. The padding has weight 0.
    """
    share = -(-options.batch // ranks)
    own, weights = batch[rank::ranks], np.zeros(share, np.float32)
    weights[: len(own)] = 1 / len(batch)
    return np.resize(own, share) if len(own) else np.zeros(share, int), weights


def options_for(framework: str) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=f"Learn handwritten digits with {framework} on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    return parser.parse_args()


def result(scores: Any, labels: Any, images_per_s: float, ranks: int) -> str:
    """Return the line of results for the `scores` of the test images."""
    accuracy = float(np.mean(np.argmax(scores, axis=1) == labels))
    return f"test accuracy {accuracy:.2%}, {images_per_s:.0f} images/s, {ranks} rank{'s' if ranks > 1 else ''}"
