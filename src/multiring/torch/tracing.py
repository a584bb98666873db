"""Exclude multiring's functions from torch.compile: a compiled function breaks its graph at each call of them.

Functions that communicate cannot be traced, because they wait for other ranks. multiring's functions are not wrapped,
so calls cost nothing extra. Instead, each function gets a mark, and the compiler calls marked functions untraced. The
function's code object gets a mark for torch's interpreter hook. The hook then skips the function and all functions that
it calls.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

_PACKAGE = str(Path(__file__).parents[1])
_WHY = "multiring's ranks communicate there, which cannot be traced"
# Layers and optimizer steps are arithmetic and may be compiled; a layer that communicates excludes itself.
_STAGES = ("after_step", "gradients", "lag", "noise", "precision", "stages")
_TRACED = (
    *("multiring.torch.nn", "multiring.torch.optim", "multiring.torch.tracing"),
    *(f"multiring.torch.step.{each}" for each in _STAGES),
)


def keep_untraced(package: str, more: ModuleType) -> None:
    """Exclude all functions of `package`'s loaded modules, and the functions that `more` exports, from tracing."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and not name.startswith(_TRACED):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    _mark_all(value)
    for name in getattr(more, "__all__", ()):
        value = getattr(more, name)
        if isinstance(value, FunctionType):
            _mark(value)


def _mark_all(value: Any) -> None:
    if isinstance(value, FunctionType):
        _mark(value)
    elif isinstance(value, type):
        for function in _functions_of(value):
            _mark(function)


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for member in list(vars(kind).values()):
        plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        for each in (plain.fget, plain.fset) if isinstance(plain, property) else (plain,):
            if isinstance(each, FunctionType):
                yield each


def _mark(function: FunctionType) -> None:
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _WHY  # noqa: SLF001 -- torch's
    if not function.__code__.co_filename.startswith(_PACKAGE):  # a standard-library wrapper, shared by others
        return
    hook = torch._C._dynamo.eval_frame  # noqa: SLF001 -- as above
    if hasattr(hook, "set_code_exec_strategy"):
        skip = hook._FrameAction.SKIP  # noqa: SLF001 -- as above
        hook.set_code_exec_strategy(function.__code__, hook._FrameExecStrategy(skip, skip))  # noqa: SLF001 -- as above
