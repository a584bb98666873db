"""The mean and variance of all ranks' samples, as Keras' batch normalization wants them, by the operations of Keras."""

from collections.abc import Callable, Sequence
from typing import Any

Summed = Callable[[list[Any]], Sequence[Any]]  # sums over the ranks, through which gradients flow


def moments(inputs: Any, mask: Any, axes: Sequence[int], axis: int, ops: Any, summed: Summed) -> tuple[Any, Any]:
    """Return the mean and the variance of each feature; ranks may have different numbers of samples.

    Args:
        inputs: this rank's samples, floating point.
        mask: of fewer dimensions than `inputs`, the first ones: which of them count; None: all do.
        axes: over which is summed: all but `axis`.
        axis: that of the features.
        ops: keras.ops.
        summed: see above.
    """
    kept = ops.ones_like(inputs)
    if mask is not None:
        missing = len(inputs.shape) - len(mask.shape)
        shaped = ops.reshape(mask, (*ops.shape(mask), *(1,) * missing))
        kept = ops.cast(ops.broadcast_to(shaped, ops.shape(inputs)), inputs.dtype)
    sums, counts = summed([ops.sum(inputs * kept, axes), ops.sum(kept, axes)])
    counts = ops.maximum(ops.stop_gradient(counts), ops.ones_like(counts))
    mean = sums / counts
    # Around the mean of all: a difference of large squares would lose the digits that matter.
    features = axis % len(inputs.shape)
    centre = ops.reshape(mean, tuple(-1 if each == features else 1 for each in range(len(inputs.shape))))
    squares = ops.sum(ops.square(inputs - centre) * kept, axes)
    return mean, summed([squares])[0] / counts
