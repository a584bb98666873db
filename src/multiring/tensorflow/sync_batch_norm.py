"""SyncBatchNormalization: batch normalization over the samples of all ranks.

It is Keras' layer with mean and variance over all ranks.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multiring._frontend.keras_batch_norm import moments
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._frontend.reduce_ops import Sum
from multiring.errors import UnsupportedError
from multiring.tensorflow.collectives import grouped_allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types
    """Batch normalization with statistics over the samples of all ranks.

    The ranks may have different numbers of samples.

    A saved model contains Keras' own layer in its place, so the model loads without multiring.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        """Make a layer like keras.layers.BatchNormalization.

        Args:
            fused: must be False, because a fused kernel uses only this rank's samples.
            process_set: by default, all ranks.
            kwargs: arguments of keras.layers.BatchNormalization.

        Raises:
            ValueError: fused=True.
            UnsupportedError: the backend of Keras is not TensorFlow.
        """
        backend = tf.keras.backend.backend()
        if backend != "tensorflow":
            raise UnsupportedError(
                f"SyncBatchNormalization of multiring.tensorflow with Keras on {backend}: want "
                "multiring.keras.SyncBatchNormalization, or KERAS_BACKEND=tensorflow"
            )
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        def summed(values: list[Any]) -> Sequence[Any]:
            found: Sequence[Any] = grouped_allreduce(values, op=Sum, process_set=self._process_set)
            return found

        return moments(inputs, mask, self._reduction_axes, self.axis, tf.keras.ops, summed)


# Keras writes the module and the name of this class into a saved model.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = SyncBatchNormalization.__qualname__ = "BatchNormalization"
