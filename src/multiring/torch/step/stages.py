"""The stages that run between a backward and the optimizer's own step, and after it, in a fixed order.

    reduce, unscale, inf check, noise scale, clip, trust ratio; step; moving average, schedule

A program attaches stages to the optimizer in any order; the optimizer remains the same object. If a stage drops the
gradients, as after an overflow, the step has none (`.grad` is None), and neither moments nor counters change. The
state of the stages is part of the optimizer's state_dict.

With gradient lag, the stages work on the gradient of the previous step, while the gradient of this step is reduced
until the next step. The mark of a gradient keeps the data that a stage needs later, such as the loss scale with which
the gradient was made.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.gradients.distributed import Distributed

KEY = "multiring_stages"
ORDER = ("lag", "unscale", "noise", "clip", "trust", "average", "schedule")

Mark = dict[str, Any]  # numbers, strings and None; marks are saved in checkpoints


class StepContext:
    """One step: its parameters, its gradients and their marks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        self.is_dropped = False
        self.is_taken = False  # gradient lag has kept the step's original gradients for the next step
        self.marks: dict[str, Mark | None] = {}  # the marks of the gradients, by the name of the stage

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that exist (are not None), in the order of the parameters."""
        return [each.grad for each in self.parameters if each.grad is not None]

    def drop(self) -> None:
        """Remove the gradients, so that the step applies nothing."""
        self.is_dropped = True
        for each in self.parameters:
            each.grad = None

    @property
    def applies(self) -> bool:
        """Whether the step has a gradient to apply."""
        return any(each.grad is not None for each in self.parameters)


class Stage(Protocol):
    """Work that is done before and after an optimizer's own step."""

    name: str  # one of ORDER

    def before(self, step: StepContext) -> None:
        """Use or replace the gradients before the optimizer's own step; do not change them in place."""

    def after(self, step: StepContext, *, applied: bool) -> None:
        """Work after the optimizer's own step. `applied` says whether the step had gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the stage keeps from step to step."""

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Restore a state that `state_dict` returned; `parameters` are the optimizer's parameters."""


@runtime_checkable
class MarkingStage(Stage, Protocol):
    """A stage that records data when a gradient is made, and uses them when the gradient is applied."""

    def mark(self, step: StepContext) -> Mark | None:
        """Return data about the new gradients.

        The stage finds them in `step.marks[name]` when the gradients are applied.

        With gradient lag, this is one step later. Keys that begin with "own" hold data of this rank alone; they are
        not saved in checkpoints.
        """


class StepStages:
    """The stages of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._stages: list[Stage] = []
        self.is_flushing = False  # the step only applies a waiting gradient, without a new one
        self._kept: list[tuple[Tensor, Tensor | None]] = []  # parameters, and their `.grad` when the step began
        self._applied = False
        self._context: StepContext | None = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loading)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        self._state: dict[str, Any] | None = None
        # A GradScaler then sets `found_inf` and calls `step`, and does not skip the step itself.
        vars(optimizer)["_step_supports_amp_scaling"] = True

    def add(self, stage: Stage) -> None:
        """Attach a stage.

        Raises:
            StateError: the optimizer already has a stage of this name.
        """
        if any(each.name == stage.name for each in self._stages):
            raise StateError(f"the optimizer has a stage {stage.name!r} already; want one at most")
        self._stages.append(stage)
        self._stages.sort(key=lambda each: ORDER.index(each.name))

    def find(self, name: str) -> Stage | None:
        """Return the stage of this name, or None."""
        return next((each for each in self._stages if each.name == name), None)

    def _before(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is not None:
            raise UnsupportedError(
                "step(closure) of an optimizer with gradient lag, LARC, loss scaling or the like: want backward() "
                "before step(), and step() without arguments"
            )
        if isinstance(optimizer, Distributed) and not self.is_flushing:
            optimizer.bring_gradients()
        step = StepContext(optimizer)
        self._context = step
        self._kept = [(each, each.grad) for each in step.parameters]
        try:
            with torch.no_grad():
                if not self.is_flushing:
                    _take_from_scaler(step)
                    marking = [stage for stage in self._stages if isinstance(stage, MarkingStage)]
                    step.marks = {stage.name: stage.mark(step) for stage in marking}
                for stage in self._stages:
                    stage.before(step)
        except BaseException:
            self._restore(step)
            raise
        self._applied = step.applies

    def _after(self, _optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        step = self._context
        if step is None:
            return
        self._context = None
        with torch.no_grad():
            for stage in self._stages:
                stage.after(step, applied=self._applied)
        self._restore(step)

    def _restore(self, step: StepContext) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = None if step.is_taken else gradient
        self._kept = []

    def _saved(self, _optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        found = {each.name: each.state_dict() for each in self._stages}
        return {**state, KEY: {name: kept for name, kept in found.items() if kept}}

    def _loading(self, _optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self._state = state.get(KEY, {})
        unknown = [name for name in self._state or {} if self.find(name) is None]
        if unknown:
            raise ArgumentError(
                f"the state has a stage {unknown[0]!r}, which this optimizer lacks; attach it before load_state_dict"
            )
        return {name: value for name, value in state.items() if name != KEY}

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for name, kept in (self._state or {}).items():
            stage = self.find(name)
            if stage is not None:
                stage.load_state_dict(kept, parameters)
        self._state = None


def stages_of(optimizer: Any) -> StepStages:
    """Return the stages of `optimizer`; create them at the first call.

    Raises:
        ArgumentError: `optimizer` is not an optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; want a torch.optim.Optimizer")
    found: StepStages | None = vars(optimizer).get("_multiring_stages")
    if found is None:
        found = StepStages(optimizer)
        vars(optimizer)["_multiring_stages"] = found
    return found


def each_gradient(step: StepContext, change: Callable[[list[Tensor]], Any]) -> None:
    """Replace all gradients by the results of `change`, which returns one tensor for each gradient."""
    having = [each for each in step.parameters if each.grad is not None]
    if having:
        for each, changed in zip(having, change([p.grad for p in having if p.grad is not None]), strict=True):
            each.grad = changed


def _take_from_scaler(step: StepContext) -> None:
    """Handle the attributes that a GradScaler sets: unscale the gradients, or drop them after an overflow."""
    given = vars(step.optimizer)
    found_inf, scale = given.get("found_inf"), given.get("grad_scale")
    if found_inf is None:
        return
    # An optimizer without support for a GradScaler rejects these attributes.
    given.update(found_inf=None, grad_scale=None)
    known = on_host([found_inf] if scale is None else [found_inf, torch.as_tensor(scale)])
    if bool(known[0]):
        step.drop()
    elif scale is not None:
        divisor = float(known[1])
        each_gradient(step, lambda gradients: [each / divisor for each in gradients])
