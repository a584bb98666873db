"""SyncBatchNormalization: Keras' batch normalization by the samples of all ranks, on any backend.

`distribute` gives a model's own layers of batch normalization this class (`synchronize`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from multiring.frontend.keras_batch_norm import moments
from multiring.frontend.keras_steps import Step, current_step
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
        step = current_step()
        if step is None:
            return moments(inputs, mask, self._reduction_axes, self.axis, keras.ops, self._summed)
        if not isinstance(step.rows, int) or not step.rows:  # a stand-in for a sample does not count
            mask = keras.ops.ones(keras.ops.shape(inputs)[:1], "bool") if mask is None else mask
            mask = keras.ops.logical_and(mask, step.rows > 0)
        both = functools.partial(by_shares, self._summed, step)
        return moments(inputs, mask, self._reduction_axes, self.axis, keras.ops, both)

    def _summed(self, values: list[Any]) -> Sequence[Any]:
        return summed(values, getattr(self, "_process_set", global_process_set))


def synchronize(layer: Any) -> None:
    """Have a layer that is keras.layers.BatchNormalization normalize by the samples of all ranks from now on."""
    if type(layer) is keras.layers.BatchNormalization and not layer.synchronized:
        layer.__class__ = SyncBatchNormalization


def by_shares(plain: Callable[[list[Any]], Sequence[Any]], step: Step, values: list[Any]) -> Sequence[Any]:
    """Return sums over the ranks; where gradients are weighted by shares afterwards, theirs are as if losses were.

    What flows back into the sum is each rank's gradient of its own loss. It counts by that rank's share, and not by the
    share of the rank that it flows to.
    """
    if step.scales_loss:
        return plain(values)
    found = plain([_backwards(value, step, inverse=True) for value in values])
    return [_backwards(value, step, inverse=False) for value in found]


def _backwards(value: Any, step: Step, *, inverse: bool) -> Any:
    """Return `value`, whose gradient is multiplied by this rank's share, or divided by it."""
    share = keras.ops.cast(step.weighted(keras.ops.ones((), "float32")), value.dtype)
    scaled = value * (keras.ops.divide_no_nan(keras.ops.ones_like(share), share) if inverse else share)
    return scaled + keras.ops.stop_gradient(value - scaled)


def summed(values: list[Any], process_set: ProcessSet) -> Sequence[Any]:
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
