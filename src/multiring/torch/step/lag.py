"""Gradient lag: each step applies the gradient of the previous step."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from multiring._arguments import require_whole
from multiring.errors import ArgumentError, StateError
from multiring.torch.gradients.distributed import Distributed, delay_gradients
from multiring.torch.gradients.rounds import Round
from multiring.torch.step.gradients import are_finite
from multiring.torch.step.stages import Mark, StepContext, StepStages, stages_of


class _Waiting:
    """The gradients that wait for the next step; their reduction may still be running."""

    def __init__(self, count: int, marks: dict[str, Mark | None], gradients: dict[int, Tensor] | Round) -> None:
        self.count = count
        self.marks = marks
        self._gradients = gradients

    def gradients(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Wait for the reduced gradients, and return them by the number of their parameter.

        Raises:
            CollectiveError: the ranks' operations differ, or a rank has failed.
        """
        if isinstance(self._gradients, dict):
            return self._gradients
        found = self._gradients.gradients()
        return {number: found[id(each)] for number, each in enumerate(parameters) if id(each) in found}


class GradientLag:
    """The stage that delays each gradient by one step; see `gradient_lag`."""

    name = "lag"

    def __init__(self, optimizer: torch.optim.Optimizer, stages: StepStages, steps: int) -> None:
        self._optimizer = optimizer
        self._stages = stages
        self._waiting: _Waiting | None = None
        if steps:
            stages.add(self)
            delay_gradients(optimizer)

    @property
    def is_pending(self) -> bool:
        """Whether a gradient waits for the next step; its reduction may still be running."""
        return self._waiting is not None

    @property
    def waiting_gradients(self) -> list[Tensor]:
        """Wait for the reduced gradients of the next step, and return them in the order of the parameters."""
        return [] if self._waiting is None else list(self._waiting.gradients(self._parameters).values())

    def flush(self) -> None:
        """Apply the waiting gradient, if there is one. Every rank must call this after the last step."""
        if self._waiting is None:
            return
        self._optimizer.zero_grad()  # raises an error if no step has used the gradients of the last backward
        self._stages.is_flushing = True
        try:
            with self._optimizer.skip_synchronize() if isinstance(self._optimizer, Distributed) else nullcontext():
                self._optimizer.step()
        finally:
            self._stages.is_flushing = False

    def before(self, step: StepContext) -> None:
        """Swap the step's gradients and marks with the waiting ones."""
        waiting = self._waiting
        if waiting is not None and waiting.count != len(step.parameters):
            raise StateError(
                f"gradient lag: gradients of {waiting.count} parameters are waiting, but the optimizer has "
                f"{len(step.parameters)} parameters now; call flush() before add_param_group"
            )
        self._waiting = None if self._stages.is_flushing else self._made(step)
        step.is_taken, step.is_dropped = True, False
        step.marks = {} if waiting is None else waiting.marks
        found = {} if waiting is None else waiting.gradients(step.parameters)
        for number, each in enumerate(step.parameters):
            each.grad = found.get(number)

    def after(self, step: StepContext, *, applied: bool) -> None:
        """Do nothing."""

    def _made(self, step: StepContext) -> _Waiting:
        optimizer, count = step.optimizer, len(step.parameters)
        on_its_way = optimizer.take_round() if isinstance(optimizer, Distributed) else None
        if on_its_way is not None and not step.is_dropped:
            return _Waiting(count, step.marks, on_its_way)
        # Copy the gradients: other code may write to their memory, as DDP does with gradient_as_bucket_view.
        own = {
            number: each.grad.detach().clone() for number, each in enumerate(step.parameters) if each.grad is not None
        }
        return _Waiting(count, step.marks, own)

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Wait for the delayed gradients, and return copies of them by the number of their parameter."""
        if self._waiting is None:
            return {"pending": {}}
        found = self._waiting.gradients(self._parameters)
        precision: Any = self._stages.find("unscale")
        if (
            precision is not None
            and not precision.whole.skips
            and not are_finite(self._parameters, list(found.values()))
        ):
            # The next step will raise an error that asks to resume from a checkpoint. A checkpoint with these gradients
            # could not be resumed.
            return {"pending": {}}
        return {
            "pending": {str(number): each.clone() for number, each in found.items()},
            "marks": {name: _shared(mark) for name, mark in self._waiting.marks.items() if mark},
        }

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Make the saved gradients wait for the next step."""
        found: dict[int, Tensor] = {}
        for number, parameter in enumerate(parameters):
            kept = state["pending"].get(str(number))
            if kept is None:
                continue
            if kept.shape != parameter.shape:
                raise ArgumentError(
                    f"gradient lag: the state has a gradient of shape {tuple(kept.shape)} for parameter {number}, of "
                    f"shape {tuple(parameter.shape)}; want the state of the same model"
                )
            found[number] = kept.clone() if kept.layout != torch.strided else torch.empty_like(parameter).copy_(kept)
        self._waiting = _Waiting(len(parameters), state.get("marks", {}), found) if found else None


def gradient_lag(optimizer: torch.optim.Optimizer, steps: int = 1) -> GradientLag:
    """Make each step of `optimizer` apply the gradient of the previous step.

        lag = mt.gradient_lag(optimizer)
        ...
        lag.flush()      # after the last step

    The first step applies nothing, and no counter advances. With a DistributedOptimizer, the ranks reduce each gradient
    while the next step's forward and backward run. A backward then ends with this rank's own gradients in `.grad`,
    which the program must not change, and a step sets `.grad` to None. A step raises StateError if it finds a change.
    On a device, a change by `GradScaler.unscale_` is found by the next step, or `flush()`, before the gradient is
    applied. Unscaling, the check for infinities, the noise scale and clipping work on the reduced gradient, one step
    later. They use the loss scale and the number of samples with which the gradient was made. Weight decay and trust
    ratios use the weights to which the gradient is applied. A gradient that overflowed is dropped, without effect on
    other gradients. The waiting gradient is part of the optimizer's state_dict. Lag costs the memory of one more set of
    gradients.

    If the program calls `optimizer.synchronize()` after a backward, the call waits for the reduced gradients, as
    without lag. The program can then change them within `skip_synchronize()`. torch's own GradScaler waits in the same
    way. In both cases, the reduction does not overlap with the next step.

    Momentum and lag together need a smaller learning rate. On a quadratic of curvature c, SGD with momentum m is stable
    up to (1 - m)/c with lag 1, in place of 2 (1 + m)/c. docs/convergence.md describes the effects.

    Args:
        optimizer: a plain or distributed optimizer; it may also become distributed later.
        steps: 1, or 0 for no lag.

    Returns:
        The stage that keeps the waiting gradient.

    Raises:
        ArgumentError: `steps` is neither 0 nor 1.
        StateError: the optimizer has gradient lag already.

    Source: Kurth et al., "Exascale deep learning for climate analytics", SC18, arXiv 1810.01993.
    """
    steps = require_whole("gradient_lag: steps", steps, 0, 1, wanted="0 or 1")
    return GradientLag(optimizer, stages_of(optimizer), steps)


def _shared(mark: Mark) -> Mark:
    return {key: value for key, value in mark.items() if not key.startswith("own")}
