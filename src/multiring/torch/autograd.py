"""Private parts of torch's autograd that the gradient reducers need, in one module to check after a torch upgrade."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward; backward raises the callback's errors.

    PyTorch's own DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp) and FSDP use the same function.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def is_compiled_backward() -> bool:
    """Return whether torch compiled the running backward as a whole. Such a backward calls no callbacks at its end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def outside_graphs(function: Function) -> Function:
    """Return `function`, wrapped so that torch.compile does not trace it.

    torch.compiler.disable does the same, but imports the compiler at once. This wrapper imports it at the first call.
    """
    found: Function = _disable_dynamo(function)  # type: ignore[assignment] # only a wrapper
    return found


def is_within_backward() -> bool:
    """Return whether this call runs inside a node of a backward, as in a reentrant checkpoint's inner backward."""
    return torch._C._current_autograd_node() is not None  # noqa: SLF001


def add_gradient_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Call `hook` each time autograd has changed `parameter.grad`; return a handle with `remove()`."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call] # torch's own


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return the gradient hooks of `parameter`, including hooks of other libraries."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return list((hooks or {}).values())


def current_backward() -> int:
    """Return the number of the running backward, unique in this process; -1 outside of a backward."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001


def version_of(tensor: Tensor) -> int:
    """Return how often `tensor` or its base was changed in place. An inference tensor has no count and gives -1."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001
