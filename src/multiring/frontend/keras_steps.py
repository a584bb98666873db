"""The training step that runs now: which part of its batch is this rank's. Imports no framework.

A step is entered by the wrapper of `train_step`, where it is traced or runs. Optimizers, losses and batch normalization
ask for it, so that what they average over the ranks counts every sample of the batch once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """This rank's part of a batch.

    rows: how many samples this rank has; 0 where it computes a stand-in that must not count.
    batch_rows: how many samples all ranks have together.
    scales_loss: whether optimizers weight the loss, in `scale_loss`; else they weight the gradients.
    weighted: multiplies a loss or a gradient by this rank's share: 1 where all ranks have as many samples.
    adopt: makes an optimizer distributed that nobody distributed before the step.
    """

    rows: Any
    batch_rows: Any
    scales_loss: bool
    weighted: Callable[[Any], Any]
    adopt: Callable[[Any], None]


_CURRENT: ContextVar[Step | None] = ContextVar("multiring_keras_step", default=None)


def current_step() -> Step | None:
    """Return the step that is being traced or run; None outside one."""
    return _CURRENT.get()


@contextmanager
def entered(step: Step) -> Iterator[None]:
    """Have `current_step` return `step` in the block."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)
