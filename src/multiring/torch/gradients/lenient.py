"""Optimizer behaviour that Horovod programs expect: lenient steps, more attributes, and zeros in `.grad`."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch

from multiring._frontend.reduce_ops import chosen_op
from multiring.torch.gradients import optimizer, state
from multiring.torch.gradients.distributed import Distributed, setup_of
from multiring.torch.gradients.setup import Setup, placed


def _lenient(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make`: its optimizers warn if gradients were changed, and have the attributes of Horovod's optimizers."""

    @wraps(make)
    def made(*arguments: Any, **keywords: Any) -> Any:
        shared = make(*arguments, **keywords)
        if isinstance(shared, Distributed):
            shared.be_lenient()
            kind = type(shared)  # a class that only this object has
            kind.__module__ = "horovod.torch.optimizer"  # Lightning looks for "horovod" in the class's name
            for name, value_of in _ATTRIBUTES.items():
                setattr(kind, name, property(value_of))
        return shared

    return made


def _setup(shared: torch.optim.Optimizer) -> Setup:
    return cast("Setup", setup_of(shared))  # made by DistributedOptimizer


def _names(shared: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    named = _setup(shared).named
    if named is not None:
        return {parameter: name for name, parameter in sorted(named, key=lambda each: each[0])}
    return {parameter: f"allreduce.noname.{number}" for number, (_, parameter) in enumerate(placed(shared))}


_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "op": lambda shared: chosen_op(_setup(shared).options.op),
    "backward_passes_per_step": lambda shared: _setup(shared).options.backward_passes_per_step,
    "process_set": lambda shared: _setup(shared).process_set,
    "_parameter_names": _names,
    "_handles": lambda _: {},  # the operations in flight after a backward; there are none
}
DistributedOptimizer = _lenient(optimizer.DistributedOptimizer)


@wraps(state.broadcast_optimizer_state)
def broadcast_optimizer_state(optimizer: Any, *arguments: Any, **keywords: Any) -> None:
    """Broadcast the optimizer's state as multiring.torch does.

    If the optimizer has no state yet, its gradients are set to zero. Horovod leaves such zeros, because it takes a step
    to create the state.
    """
    is_fresh = isinstance(optimizer, torch.optim.Optimizer) and not optimizer.state
    state.broadcast_optimizer_state(optimizer, *arguments, **keywords)
    for param_group in optimizer.param_groups if is_fresh else ():
        for parameter in param_group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
