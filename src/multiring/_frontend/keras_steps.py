"""The current training step, and this rank's part of its batch. Imports no framework.

The wrapper of `train_step` enters a step while the step is traced or runs. Optimizers, losses and batch normalization
read it to weight their averages, so that every sample of the batch counts once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPart:
    """This rank's part of a batch.

    rows: this rank's number of samples; 0 if the rank computes a placeholder batch that must not count.
    batch_rows: the number of samples of all ranks together.
    scales_loss: whether optimizers weight the loss in `scale_loss`, or else the gradients.
    weighted: multiplies a loss or a gradient by this rank's share, which is 1 if all ranks have equally many samples.
    adopt: makes an optimizer distributed if it was not distributed before the step.
    """

    rows: Any
    batch_rows: Any
    scales_loss: bool
    weighted: Callable[[Any], Any]
    adopt: Callable[[Any], None]


_CURRENT: ContextVar[BatchPart | None] = ContextVar("multiring_keras_step", default=None)


def current_step() -> BatchPart | None:
    """Return the step that is being traced or run; None outside a step."""
    return _CURRENT.get()


@contextmanager
def entered(step: BatchPart) -> Iterator[None]:
    """Make `current_step` return `step` inside the block."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)
