"""Find the gradient reducer of a parameter; a parameter has at most one."""

from collections.abc import Sequence

from torch import Tensor

from multiring._gradients.reductions import CompressionState
from multiring.errors import ArgumentError
from multiring.torch.autograd import gradient_hooks
from multiring.torch.gradients.autograd_reducer import AutogradReducer, GradientHook


def is_shared(parameter: Tensor) -> bool:
    """Return whether a gradient reducer handles `parameter`."""
    hooks = gradient_hooks(parameter)
    return any(isinstance(hook, GradientHook) and hook.reducer() is not None for hook in hooks)


def take_over(parameters: Sequence[tuple[str, Tensor]]) -> dict[int, CompressionState]:
    """Close the gradient reducers of `parameters`, and return their compression states by the parameters' `id`.

    Raises:
        ArgumentError: such a reducer has parameters that are not in `parameters`. No reducer was closed then.
    """
    ours = {id(parameter) for _, parameter in parameters}
    reducers: dict[int, tuple[str, AutogradReducer]] = {}
    for name, parameter in parameters:
        found = [hook.reducer() for hook in gradient_hooks(parameter) if isinstance(hook, GradientHook)]
        reducers |= {id(reducer): (name, reducer) for reducer in found if reducer is not None}
    for name, reducer in reducers.values():
        others = [other for key, other in reducer.names().items() if key not in ours]
        if others:
            raise ArgumentError(
                f"parameter {name} is shared by another DistributedOptimizer, which has {others[0]} too; want all of "
                "its parameters, or none"
            )
    kept: dict[int, CompressionState] = {}
    for _, reducer in reducers.values():
        kept |= reducer.states()
        reducer.close()
    return kept
