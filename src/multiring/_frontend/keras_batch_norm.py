"""Mean and variance of all ranks' samples for Keras' batch normalization, computed with keras.ops."""

from collections.abc import Callable, Sequence
from typing import Any

Summed = Callable[[list[Any]], Sequence[Any]]  # returns differentiable sums over the ranks


def moments(inputs: Any, mask: Any, axes: Sequence[int], axis: int, ops: Any, summed: Summed) -> tuple[Any, Any]:
    """Return the mean and the variance of each feature.

    Ranks may have different numbers of samples.

    Args:
        inputs: this rank's samples, floating point.
        mask: selects the elements that count. Its dimensions are the first dimensions of `inputs`. None selects all.
        axes: the axes to sum over: all but `axis`.
        axis: the axis of the features.
        ops: keras.ops.
        summed: returns the sums of tensors over the ranks.
    """
    kept = ops.ones_like(inputs)
    if mask is not None:
        missing = len(inputs.shape) - len(mask.shape)
        shaped = ops.reshape(mask, (*ops.shape(mask), *(1,) * missing))
        kept = ops.cast(ops.broadcast_to(shaped, ops.shape(inputs)), inputs.dtype)
    sums, counts = summed([ops.sum(inputs * kept, axes), ops.sum(kept, axes)])
    counts = ops.maximum(ops.stop_gradient(counts), ops.ones_like(counts))
    mean = sums / counts
    # Sum squares of differences from the mean: a difference of large sums of squares would lose precision.
    features = axis % len(inputs.shape)
    centre = ops.reshape(mean, tuple(-1 if each == features else 1 for each in range(len(inputs.shape))))
    squares = ops.sum(ops.square(inputs - centre) * kept, axes)
    return mean, summed([squares])[0] / counts
