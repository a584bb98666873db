"""Gradient lag: a step applies the gradient of the one before."""

from typing import Any

import torch
from torch import Tensor

from multiring.errors import ArgumentError, StateError
from multiring.torch.large_batch.stages import StepContext, StepStages, stages_of


class GradientLag:
    """The gradient that waits for the next step; see `gradient_lag`."""

    name = "lag"

    def __init__(self, optimizer: torch.optim.Optimizer, stages: StepStages, steps: int) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._pending: list[Tensor | None] = []
        self._fresh: list[Tensor | None] = []
        self._is_flushing = False
        if steps:
            stages.add(self)

    @property
    def is_pending(self) -> bool:
        """Whether a gradient waits."""
        return any(each is not None for each in self._pending)

    def flush(self) -> None:
        """Apply the gradient that waits, where there is one; nothing waits then. Every rank calls it, at the end."""
        if not self.is_pending:
            return
        self._optimizer.zero_grad()  # what is there was made into what waits; it is not to be reduced again
        self._is_flushing = True
        try:
            self._optimizer.step()
        finally:
            self._is_flushing = False

    def before(self, step: StepContext) -> None:
        """Exchange the gradients for those that wait."""
        if self._pending and len(self._pending) != len(step.parameters):
            raise StateError(
                f"gradient lag: gradients of {len(self._pending)} parameters wait, and the optimizer has "
                f"{len(step.parameters)} now; call flush() before add_param_group"
            )
        waiting = self._pending or [None] * len(step.parameters)
        dropped = step.is_dropped or self._is_flushing
        self._fresh = [None if dropped else each.grad for each in step.parameters]
        for each, gradient in zip(step.parameters, waiting, strict=True):
            each.grad = gradient

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- as Stage
        """Keep the gradients, in the memory of those that were applied."""
        waiting = self._pending or [None] * len(step.parameters)
        self._pending = [_kept(old, new) for old, new in zip(waiting, self._fresh, strict=True)]
        self._fresh = []

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that wait, by the number of their parameter."""
        return {"pending": {str(i): each for i, each in enumerate(self._pending) if each is not None}}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Let these gradients wait."""
        pending = state["pending"]
        self._pending = []
        for number, parameter in enumerate(parameters):
            kept = pending.get(str(number))
            if kept is not None and kept.shape != parameter.shape:
                raise ArgumentError(
                    f"gradient lag: the state has a gradient of shape {tuple(kept.shape)} for parameter {number}, of "
                    f"shape {tuple(parameter.shape)}; it is another model's"
                )
            self._pending.append(None if kept is None else torch.empty_like(parameter).copy_(kept))


def gradient_lag(optimizer: torch.optim.Optimizer, steps: int = 1) -> GradientLag:
    """Let step t of `optimizer` apply the gradient of step t - 1 to the weights as they are then; return what waits.

        lag = mt.gradient_lag(optimizer)
        ...
        lag.flush()      # after the last step

    The first step applies nothing, and no counter advances. Clipping, loss scales and checks for infinities see each
    gradient when it is made; decay and trust ratios the weights to which it is applied. A gradient that is dropped for
    an overflow is dropped alone. What waits is in the optimizer's state_dict. It costs the memory of one more gradient.

    Momentum and lag together want a smaller learning rate: on a quadratic of curvature c, SGD with momentum m is stable
    up to (1 - m)/c with lag 1, in place of 2 (1 + m)/c. docs/convergence.md says what is known.

    Args:
        optimizer: any, plain or distributed; before or after it becomes so.
        steps: 0, which changes nothing, or 1.

    Raises:
        ArgumentError: another number.
        StateError: it has lag already.

    Source: Kurth et al., "Exascale deep learning for climate analytics", SC18, arXiv 1810.01993.
    """
    if steps not in {0, 1} or isinstance(steps, bool):
        raise ArgumentError(f"gradient_lag(optimizer, {steps!r}): want 0 or 1")
    return GradientLag(optimizer, stages_of(optimizer), steps)


def _kept(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if new is None:
        return None
    if old is None or old.shape != new.shape or old.layout != new.layout:
        return new.detach().clone()
    return old.copy_(new)
