"""SyncBatchNormalization: Keras' batch normalization by the samples of all ranks, on any backend."""

from collections.abc import Sequence
from typing import Any

import keras

from multiring.frontend.keras_batch_norm import moments
from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.frontend.reduce_ops import Sum


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types
    """Batch normalization by the statistics of all ranks' samples; ranks may have different numbers of them.

    A saved model has it as Keras' own layer, and loads where there is no multiring. Every rank runs every step: a layer
    that trains is a collective, forwards and backwards.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        """Be a layer as keras.layers.BatchNormalization.

        Args:
            process_set: by default all ranks.
            kwargs: of keras.layers.BatchNormalization, without `synchronized`.

        Raises:
            ValueError: synchronized=True, which is tf.distribute's.
        """
        if kwargs.get("synchronized"):
            raise ValueError(
                "synchronized=True is for tf.distribute; leave it out: this layer knows the ranks of the job"
            )
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        def summed(values: list[Any]) -> Sequence[Any]:
            return _summed(values, self._process_set)

        return moments(inputs, mask, self._reduction_axes, self.axis, keras.ops, summed)


def _summed(values: list[Any], process_set: ProcessSet) -> Sequence[Any]:
    """Return sums over the ranks through which gradients flow."""
    found: Sequence[Any]
    if keras.backend.backend() == "tensorflow":
        from multiring.tensorflow import collectives as by_tensorflow  # noqa: PLC0415 -- where it is in use

        found = by_tensorflow.grouped_allreduce(values, op=Sum, process_set=process_set)
    elif keras.backend.backend() == "jax":
        from multiring.jax import collectives as by_jax  # noqa: PLC0415 -- as above

        found = by_jax.all_reduce(values, Sum, process_set=process_set)
    elif any(value.device.type == "meta" for value in values):
        found = values  # Keras on torch asks for shapes alone
    else:
        from multiring.torch.collectives import grouped as by_torch  # noqa: PLC0415 -- as above

        found = by_torch.grouped_allreduce(values, op=Sum, process_set=process_set)
    return found


# What Keras writes into a file is where a class is found, and its name.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = SyncBatchNormalization.__qualname__ = "BatchNormalization"
