"""Losses of a rank's part of a batch, reduced so that the ranks' shares add up to the loss of the whole batch.

Ranks' losses and gradients are averaged by samples. That is right for a loss that is a mean over the samples. A sum, a
mean over what a mask keeps, and a mean over the samples' weights have other denominators. Here such a loss is
multiplied by what it must have, beside the average by samples, to be that of the whole batch.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
from keras.src.losses import loss as keras_loss

from multiring.frontend.keras_steps import Step, current_step
from multiring.frontend.lifecycle import rank
from multiring.frontend.process_sets import global_process_set
from multiring.keras.sync_batch_norm import summed

_log = logging.getLogger("multiring")
_told: set[str] = set()


def install() -> None:
    """Have Keras' losses look at the step that runs."""
    plain = keras_loss.reduce_weighted_values
    if not hasattr(plain, "multiring"):
        found = functools.wraps(plain)(functools.partial(_reduced, plain))
        found.multiring = True  # type: ignore[attr-defined]
        keras_loss.reduce_weighted_values = found


def _reduced(
    plain: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    found = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    step = current_step()
    if step is None or reduction in (None, "none"):
        return found
    values = keras.ops.convert_to_tensor(values)
    if len(values.shape) == 0:
        tell_once(
            "a loss function returns one number for a batch, not one for each sample: each rank computes it of its "
            "own samples, and the ranks' numbers are averaged by samples, which is right for a mean only"
        )
        return found
    if reduction == "sum":
        factor = _ratio(step.batch_rows, step.rows)
    elif reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        factor = _share(_weights(sample_weight, mask, values), step)
    elif reduction != "mean_with_sample_weight" and mask is not None:
        factor = _share(keras.ops.sum(keras.ops.cast(mask, "float32")), step)
    else:
        return found
    return found * keras.ops.cast(factor, found.dtype)


def tell_once(text: str) -> None:
    """Warn on rank 0, once in a process."""
    if text not in _told:
        _told.add(text)
        if rank() == 0:
            _log.warning("keras.distribute: %s (docs/keras.md)", text)


def _weights(sample_weight: Any, mask: Any, values: Any) -> Any:
    weights = keras_loss.apply_mask(sample_weight, mask, dtype="float32", reduction="mean_with_sample_weight")
    _, weights = keras_loss.squeeze_or_expand_to_same_rank(values, keras.ops.cast(weights, "float32"))
    return keras.ops.sum(weights)


def _share(own: Any, step: Step) -> Any:
    """Return this rank's part of a denominator, over its part of the samples."""
    own = keras.ops.stop_gradient(own) * keras.ops.cast(step.rows > 0, "float32")
    total = summed([own], global_process_set)[0]
    return keras.ops.divide_no_nan(own, total) * _ratio(step.batch_rows, step.rows)


def _ratio(batch_rows: Any, rows: Any) -> Any:
    rows = keras.ops.maximum(rows, 1)  # a stand-in counts nothing afterwards
    return keras.ops.cast(batch_rows, "float32") / keras.ops.cast(rows, "float32")
