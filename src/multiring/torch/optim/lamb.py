"""LAMB: Adam with steps scaled to the norm of each layer's weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multiring._arguments import require_flag, require_number, require_numbers
from multiring._gradients.trust_ratios import lamb_ratios
from multiring.errors import ArgumentError
from multiring.torch.step.gradients import (
    as_real,
    buffers_of,
    evaluated,
    norms_of,
    number,
    plain,
    require_groups,
    with_gradients,
)


class LAMB(torch.optim.Optimizer):
    """Adam with decoupled decay and steps scaled to the norm of each layer's weights.

    `multiring._gradients.trust_ratios` gives the formula of the scale. A parameter group with trust_ratio=False steps
    as AdamW does; `parameter_groups` makes such a group of the biases and norms.

    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020,
    arXiv 1904.00962. The paper's algorithm corrects the bias of the moments; many implementations do not. Some
    implementations clip the norm of all gradients together to 1 first: for that, call `clip_gradients(optimizer, 1.0)`.
    """

    def __init__(  # noqa: PLR0913 -- torch's optimizers have as many
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        clip: float | None = None,
        limits: tuple[float, float] | None = None,
    ) -> None:
        """Optimize `params`.

        Args:
            params: tensors, pairs of names and tensors, or groups with options of their own.
            lr: the learning rate.
            betas: decay rates of the first and the second moment, each from 0 to below 1.
            eps: number added to the square root of the second moment.
            weight_decay: decoupled weight decay. It is part of the direction that is scaled.
            bias_correction: whether to correct the moments for their start at zero.
            clip: upper limit of the trust ratio. A limit of 1 means that no step is lengthened.
            limits: lower and upper limit of the weights' norm |w| in the ratio, the paper's phi.

        Raises:
            ArgumentError: a number is out of range.
        """
        lr, eps = require_number("lr", lr), require_number("eps", eps)
        weight_decay = require_number("weight_decay", weight_decay)
        first, second = require_numbers("betas", betas, 2, below=1.0)
        clip = None if clip is None else require_number("clip", clip)
        bias_correction = require_flag("bias_correction", bias_correction)
        if limits is not None:
            lower, upper = require_numbers("limits", limits, 2)
            limits = lower, upper
            if upper < lower:
                raise ArgumentError(f"limits={limits!r}: want a lower and an upper limit, 0 or more, in this order")
        defaults = {
            "lr": lr,
            "betas": (first, second),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "clip": clip,
            "limits": limits,
            "trust_ratio": True,
        }
        super().__init__(params, defaults)
        require_groups(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the parameters' current gradients."""
        loss = evaluated(closure)
        for group in self.param_groups:
            parameters, gradients = with_gradients("LAMB", group)
            if parameters:
                self._step_group(group, parameters, plain(gradients))
        return loss

    def _step_group(self, group: dict[str, Any], spread: list[Tensor], gradients: list[Tensor]) -> None:
        # The names of torch's list operations begin with an underscore.
        first, second = (as_real(plain(buffers_of(self, spread, name))) for name in ("exp_avg", "exp_avg_sq"))
        steps = self._count(spread)
        parameters, gradients = as_real(plain(spread)), as_real(gradients)
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        corrects = group["bias_correction"]
        moved = list(torch._foreach_sqrt(second))  # noqa: SLF001
        torch._foreach_div_(moved, [(1 - beta2**step) ** 0.5 if corrects else 1.0 for step in steps])
        torch._foreach_add_(moved, group["eps"])
        directions = list(torch._foreach_div(first, moved))  # noqa: SLF001
        torch._foreach_div_(directions, [1 - beta1**step if corrects else 1.0 for step in steps])
        torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        rate = number(group["lr"])
        factors = [-rate] * len(parameters)
        if group["trust_ratio"]:
            ratios = lamb_ratios(
                norms_of(parameters, spread), norms_of(directions, spread), limits=group["limits"], clip=group["clip"]
            )
            factors = [-rate * ratio for ratio in ratios.tolist()]
        torch._foreach_mul_(directions, factors)
        torch._foreach_add_(parameters, directions)

    def _count(self, parameters: list[Tensor]) -> list[float]:
        steps = []
        for each in parameters:
            state = self.state[each]
            state["step"] = state.get("step", torch.zeros((), device="cpu")) + 1
            steps.append(float(state["step"]))
        return steps
