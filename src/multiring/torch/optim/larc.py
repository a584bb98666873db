"""LARC: a trust ratio around SGD, Adam or AdamW."""

from typing import Any

import torch
from torch import Tensor

from multiring._arguments import require_choice, require_number
from multiring._gradients.trust_ratios import larc_ratios, lars_ratios
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.step.gradients import norms_of, number, plain
from multiring.torch.step.stages import StepContext, stages_of

_MODES = ("clip", "scale")
_ORDERS = ("after_moments", "before_moments")


class _AroundGradients:
    """Scales each layer's gradient, with decay, before the optimizer's own step, as published."""

    name = "trust"

    def __init__(self, trust: float, eps: float, mode: str) -> None:
        self._trust, self._eps, self._mode = trust, eps, mode
        self._decays: list[float] = []

    def before(self, step: StepContext) -> None:
        groups = step.optimizer.param_groups
        self._restore(groups)  # in case the last step raised
        self._decays = [group["weight_decay"] for group in groups]
        for group in groups:
            if group.get("trust_ratio", True):
                self._scale(group)

    def _scale(self, group: dict[str, Any]) -> None:
        having = [each for each in group["params"] if each.grad is not None]
        if not having:
            return
        decay, gradients = group["weight_decay"], [each.grad for each in having]
        ratios = lars_ratios(
            norms_of(having), norms_of(gradients), (), trust=self._trust, weight_decay=decay, eps=self._eps
        )
        factors = larc_ratios(ratios, number(group["lr"]), self._mode).tolist()
        for each, gradient, factor in zip(having, gradients, factors, strict=True):
            each.grad = torch.add(gradient, each, alpha=decay).mul_(factor)
        group["weight_decay"] = 0.0

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- the signature of Stage
        self._restore(step.optimizer.param_groups)

    def _restore(self, groups: list[dict[str, Any]]) -> None:
        for group, decay in zip(groups, self._decays, strict=False):
            group["weight_decay"] = decay
        self._decays = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Do nothing: there is no state."""


class _AroundSteps:
    """Scales the change that the optimizer's own step makes to each layer."""

    name = "trust"

    def __init__(self, trust: float, eps: float, mode: str) -> None:
        self._trust, self._eps, self._mode = trust, eps, mode
        self._before: list[tuple[float, list[Tensor], list[Tensor]]] = []

    def before(self, step: StepContext) -> None:
        self._before = []
        for group in step.optimizer.param_groups:
            having = [each for each in group["params"] if each.grad is not None]
            if having and group.get("trust_ratio", True):
                self._before.append((number(group["lr"]), having, [each.clone() for each in plain(having)]))

    def after(self, step: StepContext, *, applied: bool) -> None:  # noqa: ARG002 -- the signature of Stage
        for rate, parameters, starts in self._before:
            own = plain(parameters)
            changes = torch._foreach_sub(own, starts)  # noqa: SLF001 -- torch has no public name for it
            norms = norms_of(changes, parameters)
            norms = norms / rate if rate else norms
            ratios = lars_ratios(norms_of(starts, parameters), norms, (), trust=self._trust, eps=self._eps)
            torch._foreach_mul_(changes, larc_ratios(ratios, rate, self._mode).tolist())
            torch._foreach_add_(starts, changes)
            torch._foreach_copy_(own, starts)
        self._before = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:
        """Do nothing: there is no state."""


def LARC(  # noqa: N802 -- the field's name; one number for each term of the formula
    optimizer: torch.optim.Optimizer,
    *,
    trust_coefficient: float = 0.02,
    mode: str = "clip",
    order: str | None = None,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Scale each layer's step to the norm of its weights; return `optimizer`.

        "clip"     the layer's learning rate is min(lr, ratio)
        "scale"    the layer's learning rate is lr * ratio, as in LARS

    Args:
        optimizer: SGD, Adam or AdamW, plain or distributed. It is changed in place.
        trust_coefficient: eta of the ratio.
        mode: "clip" or "scale".
        order: "before_moments" scales the gradient and the decay before the optimizer sees them, as published; it is
            the default for SGD. It hardly affects Adam, whose moments divide the ratio out again. "after_moments"
            scales the step itself, decay included, as LAMB does; it is the default for Adam and AdamW.
        eps: added to the denominator of the ratio.

    Raises:
        ArgumentError: an argument is out of range or unknown.
        UnsupportedError: `optimizer` is neither SGD, Adam nor AdamW.

    Source: You, Gitman & Ginsburg 2017, arXiv 1708.03888, section 5; around Adam: Kurth et al., "Exascale deep learning
    for climate analytics", SC18, arXiv 1810.01993.
    """
    trust_coefficient, eps = require_number("trust_coefficient", trust_coefficient), require_number("eps", eps)
    require_choice("mode", mode, _MODES)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; want a torch.optim.Optimizer")
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    if not is_adam and not isinstance(optimizer, torch.optim.SGD):
        raise UnsupportedError(
            f"LARC around {type(optimizer).__name__}, whose step it does not know; want SGD, Adam or AdamW, or LARS or "
            "LAMB without LARC"
        )
    by_default = "after_moments" if is_adam else "before_moments"
    chosen = by_default if order is None else order
    require_choice("order", chosen, _ORDERS)
    kind = _AroundSteps if chosen == "after_moments" else _AroundGradients
    stages_of(optimizer).add(kind(trust_coefficient, eps, mode))
    return optimizer
