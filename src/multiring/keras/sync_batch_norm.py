"""SyncBatchNormalization: Keras' batch normalization with the statistics of all ranks' samples, on any backend.

`distribute` changes a model's batch normalization layers to this class (`synchronize`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from multiring._frontend.keras_batch_norm import moments
from multiring._frontend.keras_steps import BatchPart, current_step
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._frontend.reduce_ops import Sum


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types
    """Batch normalization with the statistics of all ranks' samples.

    Ranks may have different numbers of samples. A saved model contains Keras' own layer, so it can be loaded without
    multiring. Every rank must run every training step, because the layer runs collectives in the forward and the
    backward pass.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        """Create a layer with the arguments of keras.layers.BatchNormalization.

        Args:
            process_set: the ranks whose samples count; by default all ranks.
            kwargs: the arguments of keras.layers.BatchNormalization, without `synchronized`.

        Raises:
            ValueError: `synchronized` is True; that argument belongs to tf.distribute.
        """
        if kwargs.get("synchronized"):
            raise ValueError(
                "synchronized=True is for tf.distribute; leave it out: this layer knows the ranks of the job"
            )
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        step = current_step()
        if step is None:
            return moments(inputs, mask, self._reduction_axes, self.axis, keras.ops, self._summed)
        if not isinstance(step.rows, int) or not step.rows:  # ignore a placeholder sample
            mask = keras.ops.ones(keras.ops.shape(inputs)[:1], "bool") if mask is None else mask
            mask = keras.ops.logical_and(mask, step.rows > 0)
        both = functools.partial(by_shares, self._summed, step)
        return moments(inputs, mask, self._reduction_axes, self.axis, keras.ops, both)

    def _summed(self, values: list[Any]) -> Sequence[Any]:
        return summed(values, getattr(self, "_process_set", global_process_set))


def synchronize(layer: Any) -> None:
    """Make a layer of class keras.layers.BatchNormalization use the statistics of all ranks' samples."""
    if type(layer) is keras.layers.BatchNormalization and not layer.synchronized:
        layer.__class__ = SyncBatchNormalization


def by_shares(plain: Callable[[list[Any]], Sequence[Any]], step: BatchPart, values: list[Any]) -> Sequence[Any]:
    """Return sums over the ranks, with gradients that respect different shares of the batch.

    In the backward pass, the gradient of each rank's loss flows to all ranks. The share of the sending rank must weight
    this gradient. If gradients are weighted later, the receiving rank's share weights them instead, so this function
    corrects the gradients.
    """
    if step.scales_loss:
        return plain(values)
    found = plain([_backwards(value, step, inverse=True) for value in values])
    return [_backwards(value, step, inverse=False) for value in found]


def _backwards(value: Any, step: BatchPart, *, inverse: bool) -> Any:
    """Return `value`; its gradient is multiplied by this rank's share, or divided by the share if `inverse`."""
    share = keras.ops.cast(step.weighted(keras.ops.ones((), "float32")), value.dtype)
    scaled = value * (keras.ops.divide_no_nan(keras.ops.ones_like(share), share) if inverse else share)
    return scaled + keras.ops.stop_gradient(value - scaled)


def summed(values: list[Any], process_set: ProcessSet) -> Sequence[Any]:
    """Return differentiable sums of `values` over the ranks."""
    found: Sequence[Any]
    if keras.backend.backend() == "tensorflow":
        from multiring.tensorflow import collectives as by_tensorflow  # noqa: PLC0415 -- an optional framework

        found = by_tensorflow.grouped_allreduce(values, op=Sum, process_set=process_set)
    elif keras.backend.backend() == "jax":
        from multiring.jax import collectives as by_jax  # noqa: PLC0415 -- as above

        found = by_jax.allreduce(values, Sum, process_set=process_set)
    elif any(value.device.type == "meta" for value in values):
        found = values  # Keras on torch only computes shapes
    else:
        from multiring.torch.collectives import grouped as by_torch  # noqa: PLC0415 -- as above

        found = by_torch.grouped_allreduce(values, op=Sum, process_set=process_set)
    return found


# A saved model contains the module and the name of a layer's class. With these values, Keras loads its own layer.
SyncBatchNormalization.__module__ = "keras.layers"
SyncBatchNormalization.__name__ = SyncBatchNormalization.__qualname__ = "BatchNormalization"
