"""mixed_precision: 16-bit arithmetic, float32 weights, and a loss scale that is the same on all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._arguments import require_choice
from multiring._frontend.errors import internal_errors
from multiring._gradients.loss_scale import LossScale
from multiring.errors import ArgumentError, StateError
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.gradients.distributed import Distributed
from multiring.torch.interop import described
from multiring.torch.parallelizing.held import held_by
from multiring.torch.step.gradients import are_finite, scaled
from multiring.torch.step.lag import GradientLag
from multiring.torch.step.stages import Mark, StepContext, each_gradient, stages_of

_TYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class _Round:
    """The result of the check of one step's gradients, for all optimizers that share a loss scale."""

    overflows: bool
    seen_by: set[int]


@dataclass(slots=True)
class _Made:
    """The mark of one step's gradients, for all optimizers that share a loss scale."""

    mark: Mark
    seen_by: set[int]


class MixedPrecision:
    """Autocast, the loss scale, and the check of every gradient; see `mixed_precision`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], dtype: str, scale: LossScale | None) -> None:
        self._optimizers = optimizers
        self._dtype = _TYPES[dtype]
        self._scale = scale
        self._loss: Tensor | None = None  # the first loss of the step that is not finite, else the last loss
        self._steps = 0  # the number of steps whose gradients have been made
        self._made = _Made({}, set())
        self._round: _Round | None = None

    @property
    def scale(self) -> float:
        """The factor of the loss; 1 without loss scaling."""
        return 1.0 if self._scale is None else self._scale.scale

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped because of an overflow."""
        return 0 if self._scale is None else self._scale.skipped

    @property
    def steps(self) -> int:
        """The number of steps, including the skipped ones."""
        return self._steps

    def autocast(self) -> Any:
        """Return the context for the forward pass: torch's autocast, or a context without effect for float32."""
        return torch.autocast(self._device_type, self._dtype or torch.bfloat16, enabled=self._dtype is not None)

    @property
    def _device_type(self) -> str:
        """The type of the parameters' devices; if it differs, that of the first device that is not the host."""
        kinds = {
            each.device.type
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        return next(iter(sorted(kinds - {"cpu"})), "cpu")

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the scaled loss; call this outside of `autocast`."""
        # On a device, the value is not known yet.
        value, last = loss.detach().clone(), self._loss
        is_first = last is None or last.device != value.device
        self._loss = value if is_first or last is None else torch.where(last.isfinite(), value, last)
        (loss if self._scale is None else loss * self.scale).backward()  # type: ignore[no-untyped-call] # torch's own

    @property
    def skips(self) -> bool:
        """Whether a step that overflows is skipped; otherwise it raises an error."""
        return self._scale is not None

    def mark(self, part: int) -> Mark:
        """Return the mark of the gradients of optimizer `part`: the step's number, the loss scale and the loss."""
        if not self._made.mark or part in self._made.seen_by:
            self._made = _Made({"step": self._steps, "scale": self.scale, "own_loss": self._loss}, set())
            self._steps += 1
            self._loss = None
        self._made.seen_by.add(part)
        return self._made.mark

    def check(self, step: StepContext, part: int) -> None:
        """Divide one optimizer's gradients by the scale; drop them if any optimizer's gradients overflowed.

        Raises:
            StateError: a gradient is not finite, and there is no loss scale or it cannot be reduced further. Every
                rank raises it.
        """
        if self._round is None or part in self._round.seen_by:
            self._round = self._decided(step)
        found = self._round
        found.seen_by.add(part)
        scale = float((step.marks.get("unscale") or {}).get("scale", 1.0))
        if found.overflows:
            step.drop()
        elif scale != 1.0:
            # The scale is a power of two: the division is exact, except for numbers that are too small for float32.
            each_gradient(step, lambda gradients: scaled(gradients, 1.0 / scale))

    def _decided(self, step: StepContext) -> _Round:
        """Check the gradients of all optimizers, and update their common scale."""
        gradients = list(step.gradients)
        for optimizer in self._optimizers:
            if optimizer is not step.optimizer:
                gradients += _coming(optimizer)
        overflows = not are_finite(step.parameters, gradients)
        if self._scale is None:
            if overflows:
                raise self._failure(step, "")
        elif gradients:
            change = self._scale.update(overflows=overflows)
            if change != 1.0:
                self._scale_residuals(change)
            if self._scale.is_exhausted:
                raise self._failure(step, f", and the loss scale is {self.scale:g} already")
        return _Round(overflows, set())

    def _scale_residuals(self, change: float) -> None:
        """Multiply the compression errors of error feedback by `change`, the change of the loss scale."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, Distributed):
                optimizer.scale_residuals(change)

    def state(self) -> dict[str, Any]:
        """Return the state of the scale, and the number of steps."""
        return {"steps": self._steps, "scale": None if self._scale is None else self._scale.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the number of steps and the scale.

        Without loss scaling here, a saved scale is ignored. Without a saved scale, this object's scale is unchanged.
        """
        self._steps, self._round, self._made = state["steps"], None, _Made({}, set())
        if self._scale is not None and state["scale"] is not None:
            self._scale.load_state_dict(state["scale"])

    def _failure(self, step: StepContext, why: str) -> StateError:
        """Return the error for a gradient that is not finite. It names the ranks whose loss is not finite.

        All ranks must call this in the same step.
        """
        mark = step.marks.get("unscale") or {}
        loss = mark.get("own_loss")
        losses = np.array([0.0 if loss is None else float(on_host([loss])[0])])
        group = step.optimizer.group if isinstance(step.optimizer, Distributed) else None
        if group is not None and group.size > 1:
            with internal_errors("mixed_precision"):
                losses = np.asarray(group.all_gather(losses))
        bad = [rank for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
        whose = ", ".join(f"{losses[rank]} on rank {rank}" for rank in bad)
        what = f"the loss is {whose}" if bad else "the loss is finite on every rank, but gradients are not"
        return StateError(
            f"step {mark.get('step', '?')}: {what}{why}. The weights are those of the step before; resume from the "
            "last checkpoint with a lower learning rate, or without the samples that caused this"
        )


class _Part:
    """The stage of one of the optimizers that share a loss scale."""

    name = "unscale"

    def __init__(self, whole: MixedPrecision, number: int) -> None:
        self.whole = whole
        self._number = number

    def mark(self, step: StepContext) -> Mark:  # noqa: ARG002 -- as Stage
        return self.whole.mark(self._number)

    def before(self, step: StepContext) -> None:
        if not step.is_dropped:  # a GradScaler may have found an overflow before
            self.whole.check(step, self._number)

    def after(self, step: StepContext, *, applied: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return self.whole.state()

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:  # noqa: ARG002 -- as Stage
        self.whole.load_state(state)


def _coming(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients with which the next step of `optimizer` begins."""
    lag = stages_of(optimizer).find("lag")
    if isinstance(lag, GradientLag):
        return lag.waiting_gradients
    if isinstance(optimizer, Distributed):
        optimizer.bring_gradients()
    return StepContext(optimizer).gradients


def mixed_precision(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    dtype: str = "bf16",
    *,
    scale: LossScale | None = None,
) -> MixedPrecision:
    """Train in 16 bits; return the object that the training loop uses.

        precision = mt.mixed_precision(optimizer, "bf16")
        ...
        with precision.autocast():
            loss = loss_of(model(inputs), labels)
        precision.backward(loss)
        optimizer.step()

    Weights, gradients, their sums and the optimizer's state stay float32. torch's autocast also computes norms, losses
    and softmax in float32.

    With "fp16" the loss is scaled, and a step whose gradient overflows is skipped. All ranks skip the same steps,
    because they check the same reduced gradients. With the other types, a gradient that is not finite raises an error
    on every rank. The error names the step and the ranks whose loss is not finite. The weights keep their values from
    before the step.

    Gradients travel as float32 unless the DistributedOptimizer has compression=Compression.bf16 or .fp16. They then
    travel in 16 bits and are summed in float32.

    Args:
        optimizer: a plain or distributed optimizer; or several optimizers that step together, such as Muon and AdamW.
            They share one loss scale, and skip the same steps.
        dtype: "bf16", "fp16", or "float32" for the check of gradients alone.
        scale: the loss scale for "fp16"; by default one that begins at 65,536.

    Raises:
        ArgumentError: `dtype` is unknown, `scale` is given for another type than "fp16", parameters are not float32 or
            float64, or "fp16" is chosen for a model of `parallelize`.
        StateError: the optimizer has mixed precision already.
    """
    require_choice("dtype", dtype, tuple(_TYPES))
    if scale is not None and dtype != "fp16":
        raise ArgumentError(f"mixed_precision(dtype={dtype!r}, scale=...): want a scale for 'fp16' only")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    held = next(filter(None, map(held_by, optimizers)), None)
    if held is not None and dtype == "fp16":
        raise ArgumentError(
            f"mixed_precision(dtype='fp16') of a model that parallelize made ({held.parallelism}): its step() runs "
            "backward itself, and would not scale the loss; want 'bf16', or torch.amp.GradScaler as in "
            "docs/parallelize.md"
        )
    for group in (group for each in optimizers for group in each.param_groups):
        for each in group["params"]:
            if each.dtype not in {torch.float32, torch.float64}:
                raise ArgumentError(
                    f"mixed_precision of a parameter, {described(each)}: want float32 weights, because autocast makes "
                    "16-bit copies of them; use model.float()"
                )
    found = MixedPrecision(optimizers, dtype, (scale or LossScale()) if dtype == "fp16" else None)
    for number, own in enumerate(optimizers):
        stages_of(own).add(_Part(found, number))
    return found
