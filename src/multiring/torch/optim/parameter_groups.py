"""Parameter groups: weight decay and trust ratios, but not for biases and norms."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from multiring._arguments import require_flag, require_function, require_number
from multiring.errors import ArgumentError


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    without: Callable[[str, Tensor], bool] | None = None,
    trust_ratio: bool = True,
) -> list[dict[str, Any]]:
    """Return two parameter groups: with weight decay, and without (biases and norms).

        optimizer = mt.LARS(mt.parameter_groups(model, weight_decay=5e-5), lr=10.0)
        optimizer = torch.optim.AdamW(mt.parameter_groups(model, weight_decay=0.1, trust_ratio=False))

    The second group has no trust ratio either. Parameters that require no gradient are in neither group.

    Args:
        model: the model.
        weight_decay: weight decay of the first group. The second group's is 0.
        without: a function of a parameter's name and value that returns whether the parameter belongs to the second
            group. By default, parameters of at most one dimension do: biases and the scales of norms.
        trust_ratio: whether to add the option `trust_ratio` to each group, which LARS, LAMB and LARC read.

    Raises:
        ArgumentError: the model has no parameter that requires a gradient, or an argument is out of range.
    """
    weight_decay, trust_ratio = require_number("weight_decay", weight_decay), require_flag("trust_ratio", trust_ratio)
    if without is not None:
        require_function("without", without, "a function of a parameter's name and value, or None")
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
