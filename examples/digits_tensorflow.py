"""Learn handwritten digits with TensorFlow: `multiring run -n 2 -- python examples/digits_tensorflow.py`.

It has its own compiled loop: each rank has its share of every batch, and the tape returns the gradients of all ranks.
"""

import argparse
import time
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import multiring.tensorflow as mt

HELD_BACK = 360  # test images, a fifth of 1797


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the training set and the test set: images of shape (n, 8, 8, 1), and labels."""
    bunch = load_digits()
    images, labels = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis], bunch.target
    order = np.random.default_rng(2026).permutation(len(labels))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    return (images[rest], labels[rest]), (images[held_back], labels[held_back])


class Network(tf.Module):  # type: ignore[misc] # TensorFlow has no types
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(mt.rank())  # weights differ between ranks until they are broadcast
        shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (3, 3, 64, 64), (256, 128), (128, 10)]
        self.weights = [
            tf.Variable((random.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))).astype(np.float32))
            for shape in shapes
        ]
        self.biases = [tf.Variable(tf.zeros(shape[-1])) for shape in shapes]

    def __call__(self, images: Any) -> Any:
        """Return ten scores for each image."""
        found = images
        for layer in range(3):
            found = tf.nn.relu(tf.nn.conv2d(found, self.weights[layer], 1, "SAME") + self.biases[layer])
            found = tf.nn.max_pool2d(found, 2, 2, "VALID") if layer else found
        found = tf.reshape(found, [-1, 256])
        found = tf.nn.relu(found @ self.weights[3] + self.biases[3])
        return found @ self.weights[4] + self.biases[4]


def main() -> None:
    """Train, and print the accuracy and speed."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with TensorFlow on any number of ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    options = parser.parse_args()
    mt.init()
    (images, labels), (test_images, test_labels) = digits()
    network = Network()
    mt.broadcast_variables(network.trainable_variables, root_rank=0)
    moments = [tf.Variable(tf.zeros_like(each)) for each in network.trainable_variables]

    def step(own_images: Any, own_labels: Any, whole: Any) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.nn.sparse_softmax_cross_entropy_with_logits(own_labels, network(own_images))
            loss = tf.reduce_sum(errors) / whole
        # A rank's loss is its samples' part of the whole batch's loss, so the ranks' gradients add up to the gradient.
        tape = mt.DistributedGradientTape(tape, op=mt.Sum)
        gradients = tape.gradient(loss, network.trainable_variables)
        for variable, moment, gradient in zip(network.trainable_variables, moments, gradients, strict=True):
            moment.assign(0.9 * moment + gradient)
            variable.assign_sub(0.05 * moment)
        return loss

    # Shares have two lengths, for full batches and for the last batch; one compiled program serves both.
    signature = [tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int64), tf.TensorSpec([])]
    compiled = tf.function(step, input_signature=signature)
    random = np.random.default_rng(1)  # the same order on all ranks
    start = time.perf_counter()
    for _ in range(options.epochs):
        order = random.permutation(len(labels))
        for first in range(0, len(order), options.batch):
            batch = order[first : first + options.batch]
            own = batch[mt.rank() :: mt.size()]
            compiled(images[own], labels[own], float(len(batch)))
    elapsed_s = time.perf_counter() - start
    accuracy = float(np.mean(np.argmax(network(test_images), axis=1) == test_labels))
    mt.print_once(
        f"test accuracy {accuracy:.2%}, {options.epochs * len(labels) / elapsed_s:.0f} images/s, "
        f"{mt.size()} rank{'s' if mt.size() > 1 else ''}"
    )


if __name__ == "__main__":
    main()
