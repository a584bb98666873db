"""LARS: momentum SGD with steps scaled to the norm of each layer's weights."""

from collections.abc import Callable
from typing import Any

import torch

from multiring._arguments import require_choice, require_flag, require_number
from multiring._gradients.trust_ratios import LARS_FORMS, lars_ratios
from multiring.torch.step.gradients import (
    buffers_of,
    evaluated,
    norms_of,
    number,
    plain,
    require_groups,
    with_gradients,
)


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose steps are scaled to the norm of each layer's weights.

    `multiring._gradients.trust_ratios` gives the formula of the scale. Three forms are published. They differ in the
    denominator of the ratio, and in the effect of a change of the learning rate on the momentum:

        "paper"    |g| + wd |w|    v = m v + lr ratio (g + wd w);  w = w - v
        "optax"    |g + wd w|      as "paper"
        "timm"     |g| + wd |w|    v = m v + ratio (g + wd w);     w = w - lr v      as in torch's SGD

    A parameter group with trust_ratio=False steps as SGD does; `parameter_groups` makes such a group of the biases and
    norms.

    Source: You, Gitman & Ginsburg, "Large batch training of convolutional networks", 2017, arXiv 1708.03888.
    """

    def __init__(  # noqa: PLR0913 -- torch's optimizers have as many
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        form: str = "paper",
    ) -> None:
        """Optimize `params`.

        Args:
            params: tensors, pairs of names and tensors, or groups with options of their own.
            lr: the learning rate. With a trust coefficient of 0.001, use about 10 for a batch of 4,096.
            momentum: the momentum factor, from 0 to below 1.
            weight_decay: the weights times this factor are added to the gradient.
            trust_coefficient: eta of the ratio.
            eps: added to the denominator of the ratio.
            nesterov: whether to use Nesterov momentum.
            form: "paper", "optax" or "timm".

        Raises:
            ArgumentError: a number is out of range, or `form` is unknown.
        """
        lr, eps = require_number("lr", lr), require_number("eps", eps)
        weight_decay = require_number("weight_decay", weight_decay)
        trust_coefficient = require_number("trust_coefficient", trust_coefficient)
        momentum, nesterov = require_number("momentum", momentum, below=1.0), require_flag("nesterov", nesterov)
        require_choice("form", form, tuple(LARS_FORMS))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "form": form,
            "trust_ratio": True,
        }
        super().__init__(params, defaults)
        require_groups(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the parameters' current gradients."""
        loss = evaluated(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        spread, whole_gradients = with_gradients("LARS", group)
        if not spread:
            return
        parameters, gradients = plain(spread), plain(whole_gradients)
        rate, momentum = number(group["lr"]), group["momentum"]
        denominator, is_inside = LARS_FORMS[group["form"]]
        # The names of torch's list operations begin with an underscore.
        moved = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])  # noqa: SLF001
        if group["trust_ratio"]:
            ratios = lars_ratios(
                norms_of(parameters, spread),
                norms_of(gradients, spread),
                norms_of(moved, spread) if denominator == "sum" else (),
                trust=group["trust_coefficient"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                denominator=denominator,
            ).tolist()
        else:
            ratios = [1.0] * len(parameters)
        torch._foreach_mul_(moved, [ratio * (rate if is_inside else 1.0) for ratio in ratios])
        if momentum:
            buffers = plain(buffers_of(self, spread, "momentum_buffer"))
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, moved)
            if group["nesterov"]:
                torch._foreach_add_(moved, buffers, alpha=momentum)
            else:
                moved = tuple(buffers)
        torch._foreach_add_(parameters, moved, alpha=-1.0 if is_inside else -rate)
