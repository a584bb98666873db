"""LARS: momentum SGD whose layers step by the size of their weights."""

from collections.abc import Callable
from typing import Any

import torch

from multiring.optim.trust_ratios import DENOMINATORS, lars_ratios, require_choice, require_number
from multiring.torch.large_batch.gradients import (
    buffers_of,
    evaluated,
    norms_of,
    number,
    require_groups,
    with_gradients,
)

_PLACES = ("inside", "outside")


class LARS(torch.optim.Optimizer):
    """SGD with momentum, each layer's step in proportion to its weights; see `multiring.optim.trust_ratios`.

    Two forms are published, which differ once the learning rate changes:

        learning_rate="inside"     v = m v + lr ratio (g + wd w);  w = w - v         the paper's, optax's
        learning_rate="outside"    v = m v + ratio (g + wd w);     w = w - lr v      as torch's SGD

    A parameter group with trust_ratio=False steps as SGD does; `parameter_groups` makes one of biases and norms.

    Source: You, Gitman & Ginsburg, "Large batch training of convolutional networks", 2017, arXiv 1708.03888.
    """

    def __init__(  # noqa: PLR0913 -- as torch's optimizers
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        denominator: str = "norms",
        learning_rate: str = "inside",
    ) -> None:
        """Take these parameters.

        Args:
            params: tensors, pairs of names and tensors, or groups with options of their own.
            lr: the learning rate; with a trust coefficient of 0.001 about 10 at a batch of 4,096.
            momentum: 0 to 1.
            weight_decay: added to the gradient, times the weights.
            trust_coefficient: eta.
            eps: added to the denominator of the ratio.
            nesterov: whether a step looks ahead.
            denominator: "norms", |g| + wd |w|, or "sum", |g + wd w|.
            learning_rate: where it stands.

        Raises:
            ArgumentError: a number out of range, or a form that does not exist.
        """
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            require_number(name, value)
        require_number("trust_coefficient", trust_coefficient)
        require_number("momentum", momentum, below=1.0)
        require_choice("denominator", denominator, DENOMINATORS)
        require_choice("learning_rate", learning_rate, _PLACES)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "denominator": denominator,
            "learning_rate": learning_rate,
            "trust_ratio": True,
        }
        super().__init__(params, defaults)
        require_groups(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the gradients there are."""
        loss = evaluated(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters, gradients = with_gradients("LARS", group)
        if not parameters:
            return
        rate, momentum = number(group["lr"]), group["momentum"]
        # torch's own names of its operations on lists.
        moved = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])  # noqa: SLF001
        if group["trust_ratio"]:
            ratios = lars_ratios(
                norms_of(parameters),
                norms_of(gradients),
                norms_of(moved) if group["denominator"] == "sum" else (),
                trust=group["trust_coefficient"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                denominator=group["denominator"],
            ).tolist()
        else:
            ratios = [1.0] * len(parameters)
        is_inside = group["learning_rate"] == "inside"
        torch._foreach_mul_(moved, [ratio * (rate if is_inside else 1.0) for ratio in ratios])
        if momentum:
            buffers = buffers_of(self, parameters, "momentum_buffer")
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, moved)
            if group["nesterov"]:
                torch._foreach_add_(moved, buffers, alpha=momentum)
            else:
                moved = tuple(buffers)
        torch._foreach_add_(parameters, moved, alpha=-1.0 if is_inside else -rate)
