"""Gradients of all ranks combined, by TensorFlow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from multiring.frontend.gradient_reduction import GradientReduction
from multiring.tensorflow.collectives import grouped_allreduce
from multiring.tensorflow.compression import Compression


@dataclass
class TensorReduction(GradientReduction):
    """Tensors, and IndexedSlices. See `DistributedGradientTape` for what the fields mean."""

    compression: Any = Compression.none
    device_dense: str = ""
    device_sparse: str = ""
    sparse_as_dense: bool = False
    has_generic_names: bool = False  # rather than those that a graph gives

    def combine(self, gradients: list[Any], name: str) -> Sequence[Any]:
        """Return these gradients combined over the ranks."""
        if self.sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        with tf.name_scope(f"{self.name}_Allreduce"):
            return grouped_allreduce(
                gradients,
                device_dense=self.device_dense,
                device_sparse=self.device_sparse,
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / self.predivide_factor,
                postscale_factor=self.predivide_factor,
                process_set=self.process_set,
                ignore_name_scope=self.has_generic_names,
                name=name if self.has_generic_names else None,
            )

    def divided(self, gradient: Any, ranks: int) -> Any:
        """Return `gradient` divided by a number."""
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / ranks, gradient.indices, gradient.dense_shape)
        return gradient / ranks
