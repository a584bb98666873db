"""Scale the loss of a rank's part of a batch so that the ranks' average is the loss of the whole batch.

The ranks' losses and gradients are averaged, weighted by samples. This is right for a loss that is a mean over the
samples. A sum, a mean over the unmasked elements, and a mean weighted by sample weights have other denominators. This
module multiplies such a loss by a factor, so that the weighted average is the loss of the whole batch.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
from keras.src.losses import loss as keras_loss

from multiring._frontend.keras_steps import BatchPart, current_step
from multiring._frontend.lifecycle import rank
from multiring._frontend.process_sets import global_process_set
from multiring.keras.sync_batch_norm import summed

_log = logging.getLogger("multiring")
_told: set[str] = set()


def install() -> None:
    """Patch Keras so that its losses are scaled for the current step."""
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
            "a loss function returns one number per batch instead of one per sample: each rank computes it from its "
            "own samples, and the ranks' numbers are averaged, weighted by samples. This is right only for a mean"
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
    """Log a warning on rank 0, once per process."""
    if text not in _told:
        _told.add(text)
        if rank() == 0:
            _log.warning("keras.distribute: %s (docs/keras.md)", text)


def _weights(sample_weight: Any, mask: Any, values: Any) -> Any:
    weights = keras_loss.apply_mask(sample_weight, mask, dtype="float32", reduction="mean_with_sample_weight")
    _, weights = keras_loss.squeeze_or_expand_to_same_rank(values, keras.ops.cast(weights, "float32"))
    return keras.ops.sum(weights)


def _share(own: Any, step: BatchPart) -> Any:
    """Return the factor of the loss: this rank's share of the denominator, divided by its share of the samples."""
    own = keras.ops.stop_gradient(own) * keras.ops.cast(step.rows > 0, "float32")
    total = summed([own], global_process_set)[0]
    return keras.ops.divide_no_nan(own, total) * _ratio(step.batch_rows, step.rows)


def _ratio(batch_rows: Any, rows: Any) -> Any:
    rows = keras.ops.maximum(rows, 1)  # a placeholder batch with 0 rows gets weight 0 later
    return keras.ops.cast(batch_rows, "float32") / keras.ops.cast(rows, "float32")
