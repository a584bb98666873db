"""Forward, backward and optimizer steps in the timeline, recorded by hooks.

forward     an outermost call of a module, which is not within another module's call
backward    from the first gradient of such a module's output to the end of that backward's graph; the wait for other
            ranks' gradients follows it. It is shown in the thread of the forward call: for tensors of a device, torch
            calls the hooks in another thread
optimizer   a step, including its hooks

torch has hooks for all modules and for all optimizers, but none for all backwards. Under torch.compile only the
outermost call, which is not compiled, is hooked.
"""

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from multiring.torch.autograd import call_after_backward, current_backward
from multiring.trace import Spans, follow


class _Calls(threading.local):
    """The running calls of a thread: its outermost module and its optimizer steps."""

    def __init__(self) -> None:
        self.outermost: nn.Module | None = None
        self.depth = 0  # how many calls of the outermost module are nested in each other
        self.began_ns = 0
        self.steps: dict[int, int] = {}  # start of each optimizer's step, by `id`


class _Hooks:
    """Installs the hooks when a timeline starts, and removes them when it stops."""

    def __init__(self) -> None:
        self._spans = Spans()
        self._calls = _Calls()
        self._handles: list[Any] = []
        self._lock = threading.Lock()
        self._backwards: set[int] = set()  # the numbers of the backwards whose end the timeline awaits

    def started(self, spans: Spans) -> None:
        """Install the hooks, which add to `spans`."""
        self._spans = spans
        self._calls = _Calls()
        self._backwards.clear()
        # The warning is true but harmless, because only the outermost of nested calls is recorded.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks", UserWarning)
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def stopped(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls
        if calls.outermost is None:
            calls.outermost = module
            calls.depth = 1
            calls.began_ns = time.monotonic_ns()
        elif calls.outermost is module:
            calls.depth += 1

    def _after_forward(self, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls
        if calls.outermost is not module:
            return
        calls.depth -= 1
        if calls.depth:
            return
        calls.outermost = None
        self._spans.add(f"forward {type(module).__name__}", "forward", calls.began_ns, time.monotonic_ns())
        in_backward = partial(self._in_backward, threading.get_native_id())
        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(in_backward)  # type: ignore[no-untyped-call] # torch does not annotate it

    def _in_backward(self, thread: int, _gradient: Tensor) -> None:
        backward = current_backward()
        with self._lock:
            if backward in self._backwards:
                return
            self._backwards.add(backward)
        start_ns = time.monotonic_ns()
        call_after_backward(lambda: self._after_backward(backward, start_ns, thread))

    def _after_backward(self, backward: int, start_ns: int, thread: int) -> None:
        with self._lock:
            self._backwards.discard(backward)
        self._spans.add("backward", "backward", start_ns, time.monotonic_ns(), thread)

    def _before_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        self._calls.steps[id(optimizer)] = time.monotonic_ns()

    def _after_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        start_ns = self._calls.steps.pop(id(optimizer), None)
        if start_ns is not None:
            name = f"optimizer {type(optimizer).__name__}"
            self._spans.add(name, "optimizer", start_ns, time.monotonic_ns())


_hooks = _Hooks()


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, which may nest sequences, mappings and dataclasses."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from _tensors(each)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str | bytes):
        for each in outputs:
            yield from _tensors(each)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from _tensors(getattr(outputs, name))


follow(_hooks)  # install these hooks whenever a timeline starts
