"""Gradient lag: a step applies the gradient of the one before."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from multiring.errors import ArgumentError, StateError
from multiring.torch.gradients.distributed import Distributed, delay_gradients
from multiring.torch.gradients.rounds import Round
from multiring.torch.step.gradients import are_finite
from multiring.torch.step.stages import Mark, StepContext, StepStages, stages_of


class _Waiting:
    """A gradient that waits for the next step, perhaps still on its way; by the number of its parameter."""

    def __init__(self, count: int, marks: dict[str, Mark | None], gradients: dict[int, Tensor] | Round) -> None:
        self.count = count
        self.marks = marks
        self._gradients = gradients

    def gradients(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the gradients of all ranks, once they are there.

        Raises:
            HorovodInternalError: ranks disagree, or one is gone.
        """
        if isinstance(self._gradients, dict):
            return self._gradients
        found = self._gradients.gradients()
        return {number: found[id(each)] for number, each in enumerate(parameters) if id(each) in found}


class GradientLag:
    """The gradient that waits for the next step; see `gradient_lag`."""

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
        """Whether a gradient waits, be it on its way."""
        return self._waiting is not None

    @property
    def waiting_gradients(self) -> list[Tensor]:
        """Those that the next step applies, in the order of the parameters, once they are there."""
        return [] if self._waiting is None else list(self._waiting.gradients(self._parameters).values())

    def flush(self) -> None:
        """Apply the gradient that waits, where there is one; nothing waits then. Every rank calls it, at the end."""
        if self._waiting is None:
            return
        self._optimizer.zero_grad()  # raises where a backward has brought gradients that no step has seen
        self._stages.is_flushing = True
        try:
            with self._optimizer.skip_synchronize() if isinstance(self._optimizer, Distributed) else nullcontext():
                self._optimizer.step()
        finally:
            self._stages.is_flushing = False

    def before(self, step: StepContext) -> None:
        """Exchange the gradients, and what is known of them, for those that wait."""
        waiting = self._waiting
        if waiting is not None and waiting.count != len(step.parameters):
            raise StateError(
                f"gradient lag: gradients of {waiting.count} parameters wait, and the optimizer has "
                f"{len(step.parameters)} now; call flush() before add_param_group"
            )
        self._waiting = None if self._stages.is_flushing else self._made(step)
        step.is_taken, step.is_dropped = True, False
        step.marks = {} if waiting is None else waiting.marks
        found = {} if waiting is None else waiting.gradients(step.parameters)
        for number, each in enumerate(step.parameters):
            each.grad = found.get(number)

    def after(self, step: StepContext, *, applied: bool) -> None:
        """There is nothing to do."""

    def _made(self, step: StepContext) -> _Waiting:
        optimizer, count = step.optimizer, len(step.parameters)
        on_its_way = optimizer.take_round() if isinstance(optimizer, Distributed) else None
        if on_its_way is not None and not step.is_dropped:
            return _Waiting(count, step.marks, on_its_way)
        # Copies: others may keep that memory and write to it, as DDP does with gradient_as_bucket_view.
        own = {
            number: each.grad.detach().clone() for number, each in enumerate(step.parameters) if each.grad is not None
        }
        return _Waiting(count, step.marks, own)

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the gradients that wait, by the number of their parameter, once they are there."""
        if self._waiting is None:
            return {"pending": {}}
        found = self._waiting.gradients(self._parameters)
        precision: Any = self._stages.find("unscale")
        if (
            precision is not None
            and not precision.whole.skips
            and not are_finite(self._parameters, list(found.values()))
        ):
            # The next step will raise an error that asks to go on from this state: it is to be one that can.
            return {"pending": {}}
        return {
            "pending": {str(number): each.clone() for number, each in found.items()},
            "marks": {name: _shared(mark) for name, mark in self._waiting.marks.items() if mark},
        }

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Let these gradients wait."""
        found: dict[int, Tensor] = {}
        for number, parameter in enumerate(parameters):
            kept = state["pending"].get(str(number))
            if kept is None:
                continue
            if kept.shape != parameter.shape:
                raise ArgumentError(
                    f"gradient lag: the state has a gradient of shape {tuple(kept.shape)} for parameter {number}, of "
                    f"shape {tuple(parameter.shape)}; it is another model's"
                )
            found[number] = kept.clone() if kept.layout != torch.strided else torch.empty_like(parameter).copy_(kept)
        self._waiting = _Waiting(len(parameters), state.get("marks", {}), found) if found else None


def gradient_lag(optimizer: torch.optim.Optimizer, steps: int = 1) -> GradientLag:
    """Let step t of `optimizer` apply the gradient of step t - 1 to the weights as they are then; return what waits.

        lag = mt.gradient_lag(optimizer)
        ...
        lag.flush()      # after the last step

    The first step applies nothing, and no counter advances. With a DistributedOptimizer the ranks reduce each gradient
    while the next step's forward and backward run: a backward ends with this rank's own gradients in `.grad`, which
    are not to be changed, and a step leaves None there. Unscaling, the check for infinities, the noise scale and
    clipping come with the reduced gradient, one step later, by what was known when it was made; decay and trust ratios
    are of the weights to which it is applied. A gradient that overflowed is dropped alone. What waits is in the
    optimizer's state_dict. It costs the memory of one more set of gradients.

    `optimizer.synchronize()` after a backward waits for its gradients, as without lag, so that they can be seen and
    changed within `skip_synchronize()`; so does torch's own GradScaler. Nothing is hidden then.

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


def _shared(mark: Mark) -> Mark:
    return {key: value for key, value in mark.items() if not key.startswith("own")}
