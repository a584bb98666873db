"""Learn handwritten digits with TensorFlow: `multiring run -n 2 -- python examples/digits_tensorflow.py`.

It has its own compiled loop: each rank has its share of every batch, and the tape returns the gradients of all ranks.
"""

import time
from typing import Any

import numpy as np
import tensorflow as tf
from digits_data import batches, digits, options_for, result  # type: ignore[import-not-found] # beside this file

import multiring.tensorflow as mt


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
    options = options_for("TensorFlow")
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
    start = time.perf_counter()
    for batch in batches(len(labels), options):
        own = batch[mt.rank() :: mt.size()]
        compiled(images[own], labels[own], float(len(batch)))
    elapsed_s = time.perf_counter() - start
    images_per_s = options.epochs * len(labels) / elapsed_s
    mt.print_once(result(network(test_images), test_labels, images_per_s, mt.size()))


if __name__ == "__main__":
    main()
