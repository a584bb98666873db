"""What sharing gradients needs of torch's autograd and torch keeps private: one place to look after an upgrade."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called at the end of the backward that is going on; what it raises, backward raises.

    Also used by PyTorch's own DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp) and FSDP.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def is_compiled_backward() -> bool:
    """Return whether the backward that is going on was compiled as a whole: it calls nothing at its end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def outside_graphs(function: Function) -> Function:
    """Return `function`, made to run as it is where torch.compile would trace it.

    As torch.compiler.disable, which imports the compiler at once; this does when the function is called first.
    """
    found: Function = _disable_dynamo(function)  # type: ignore[assignment] # it is wrapped, no more
    return found


def is_within_backward() -> bool:
    """Return whether a node of some backward is at work, as around the backward of a reentrant checkpoint."""
    return torch._C._current_autograd_node() is not None  # noqa: SLF001


def add_gradient_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Have `hook` called each time `parameter.grad` has changed; the handle returned has `remove()`."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call] # torch's own


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks of `parameter`, also those of other libraries."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return list((hooks or {}).values())


def current_backward() -> int:
    """Return a number that tells the backward that is going on from all others of this process; -1 outside of any."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001


def version_of(tensor: Tensor) -> int:
    """Return how often `tensor`, or what it is a view of, was changed in place; -1 where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001
