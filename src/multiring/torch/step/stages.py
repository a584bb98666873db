"""What happens between a backward and the optimizer's own step, and after it, in one order.

    reduce, unscale, inf check, noise scale, clip, trust ratio; step; moving average, schedule

Each is a stage, attached to the optimizer in any order; the optimizer stays the object that it was. A gradient that is
dropped, as after an overflow, leaves the step without any (`.grad` None), so that neither moments nor counters move.
What stages keep is in the optimizer's state_dict.

Gradient lag puts the gradient of the step before at the front of all this, and lets this step's be reduced until the
next one. What a stage knows of a gradient when it is made, such as its loss scale, goes along with it: its mark.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.torch.gradients.distributed import Distributed

KEY = "multiring_stages"
ORDER = ("lag", "unscale", "noise", "clip", "trust", "average", "schedule")

Mark = dict[str, Any]  # numbers, strings and None, which go into checkpoints


class StepContext:
    """One step: its parameters, and whether they have a gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        self.is_dropped = False
        self.is_taken = False  # what `.grad` was when the step began is somebody's who keeps it for the next one
        self.marks: dict[str, Mark | None] = {}  # of the gradients, by stage

    @property
    def gradients(self) -> list[Tensor]:
        """Those there are, in the order of the parameters."""
        return [each.grad for each in self.parameters if each.grad is not None]

    def drop(self) -> None:
        """Take the gradients away: this step has none."""
        self.is_dropped = True
        for each in self.parameters:
            each.grad = None

    @property
    def applies(self) -> bool:
        """Whether the step has a gradient to apply."""
        return any(each.grad is not None for each in self.parameters)


class Stage(Protocol):
    """A part of a step."""

    name: str  # one of ORDER

    def before(self, step: StepContext) -> None:
        """Look at, or change, the gradients before the optimizer's own step; out of place."""

    def after(self, step: StepContext, *, applied: bool) -> None:
        """See what the step has made; `applied` says whether it had gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step."""

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Keep what `state_dict` returned; `parameters` are the optimizer's."""


@runtime_checkable
class MarkingStage(Stage, Protocol):
    """One that knows something of a gradient when it is made, which it wants to know when that is applied."""

    def mark(self, step: StepContext) -> Mark | None:
        """Return that, of the gradients just made; as `step.marks[name]` it comes back, perhaps a step later.

        What is this rank's own has a name that begins with "own", and does not go into checkpoints.
        """


class StepStages:
    """The stages of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._stages: list[Stage] = []
        self.is_flushing = False  # the step is for a gradient that waits: none has been made
        self._kept: list[tuple[Tensor, Tensor | None]] = []  # what `.grad` was when the step began
        self._applied = False
        self._context: StepContext | None = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loading)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        self._state: dict[str, Any] | None = None
        # A GradScaler then tells what it found, in place of leaving the step out.
        vars(optimizer)["_step_supports_amp_scaling"] = True

    def add(self, stage: Stage) -> None:
        """Take one more.

        Raises:
            StateError: there is one of that kind.
        """
        if any(each.name == stage.name for each in self._stages):
            raise StateError(f"the optimizer has a stage {stage.name!r} already; want one at most")
        self._stages.append(stage)
        self._stages.sort(key=lambda each: ORDER.index(each.name))

    def find(self, name: str) -> Stage | None:
        """Return the stage of that name, where there is one."""
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
                f"the state has a stage {unknown[0]!r}, which this optimizer has not; attach it before load_state_dict"
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
    """Return the stages of `optimizer`, which has some from then on.

    Raises:
        ArgumentError: it is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; want a torch.optim.Optimizer")
    found: StepStages | None = vars(optimizer).get("_multiring_stages")
    if found is None:
        found = StepStages(optimizer)
        vars(optimizer)["_multiring_stages"] = found
    return found


def each_gradient(step: StepContext, change: Callable[[list[Tensor]], Any]) -> None:
    """Let `change` of all gradients be the gradients; it returns as many new tensors."""
    having = [each for each in step.parameters if each.grad is not None]
    if having:
        for each, changed in zip(having, change([p.grad for p in having if p.grad is not None]), strict=True):
            each.grad = changed


def _take_from_scaler(step: StepContext) -> None:
    """Do what a GradScaler asks of an optimizer: unscale, and leave out what overflowed."""
    given = vars(step.optimizer)
    found_inf, scale = given.get("found_inf"), given.get("grad_scale")
    if found_inf is None:
        return
    # Optimizers that do not know what these are refuse them.
    given.update(found_inf=None, grad_scale=None)
    if bool(found_inf):
        step.drop()
    elif scale is not None:
        each_gradient(step, lambda gradients: [each / float(scale) for each in gradients])
