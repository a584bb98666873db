"""Which parameters take weight decay and a trust ratio: matrices and filters do; biases and norms do not."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from multiring.errors import ArgumentError


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    without: Callable[[str, Tensor], bool] | None = None,
    trust_ratio: bool = True,
) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: what decays, and biases and norms, which do not, and have no trust ratio.

        optimizer = mt.LARS(mt.parameter_groups(model, weight_decay=5e-5), lr=10.0)
        optimizer = torch.optim.AdamW(mt.parameter_groups(model, weight_decay=0.1, trust_ratio=False))

    Args:
        model: whose parameters that require a gradient there are.
        weight_decay: of the first group; the second's is 0.
        without: whether a parameter, by name and value, is of the second group; by default those of at most one
            dimension, which are biases and the scales of norms.
        trust_ratio: whether the groups say if they have one, as LARS, LAMB and LARC want to know.

    Raises:
        ArgumentError: the model has no parameter to train.
    """
    chosen = without or (lambda _name, parameter: parameter.dim() <= 1)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if not named:
        raise ArgumentError(f"parameter_groups: {type(model).__name__} has no parameter that requires a gradient")
    groups: list[tuple[Sequence[Tensor], float, bool]] = [
        ([each for name, each in named if not chosen(name, each)], weight_decay, True),
        ([each for name, each in named if chosen(name, each)], 0.0, False),
    ]
    return [
        {"params": parameters, "weight_decay": decay, **({"trust_ratio": has_ratio} if trust_ratio else {})}
        for parameters, decay, has_ratio in groups
        if parameters
    ]
