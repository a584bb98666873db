"""SyncBatchNormalization: Keras' batch normalization with the mean and variance of all ranks' samples."""

from typing import Any

import tensorflow as tf

from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.frontend.reduce_ops import Sum
from multiring.tensorflow.collectives import allreduce, grouped_allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types
    """Batch normalization by the statistics of all ranks' samples; ranks may have different numbers of them.

    A saved model has it as Keras' own layer, and loads where there is no multiring.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        """Be a layer as keras.layers.BatchNormalization.

        Args:
            fused: only False: a fused kernel knows this rank's samples alone.
            process_set: by default all ranks.
            kwargs: of keras.layers.BatchNormalization.

        Raises:
            ValueError: fused=True.
        """
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        axes, kind = self._reduction_axes, inputs.dtype
        if mask is None:
            kept = tf.ones_like(inputs)
        else:
            missing = len(inputs.shape) - len(mask.shape)
            shape = tf.concat([tf.shape(mask), tf.ones([missing], tf.int32)], 0)
            kept = tf.cast(tf.broadcast_to(tf.reshape(mask, shape), tf.shape(inputs)), kind)
        sums, counts = grouped_allreduce(
            [tf.reduce_sum(inputs * kept, axes), tf.reduce_sum(kept, axes)], op=Sum, process_set=self._process_set
        )
        counts = tf.maximum(tf.stop_gradient(counts), tf.ones_like(counts))
        mean = sums / counts
        # Around the mean of all: a difference of large squares would lose the digits that matter.
        centre = tf.reshape(
            mean, [-1 if axis == self.axis % len(inputs.shape) else 1 for axis in range(len(inputs.shape))]
        )
        squares = tf.reduce_sum(tf.square(inputs - centre) * kept, axes)
        return mean, allreduce(squares, op=Sum, process_set=self._process_set) / counts


# What Keras writes into a file is where a class is found, and its name.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = SyncBatchNormalization.__qualname__ = "BatchNormalization"
