"""Save and restore the attributes of a module other than its parameters."""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Parameters, children and hooks are skipped, because a forward does not change them.
_NOT_STATE = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set", "training"}
_Seen = dict[int, Any]


class _Noted:
    """An object that may be changed in place, and its saved content."""

    def __init__(self, value: Any, before: Any) -> None:
        self.value = value
        self.before = before


def remembered(module: nn.Module) -> dict[str, Any]:
    """Return `module`'s attributes, with copies of tensors, arrays and containers."""
    seen: _Seen = {}
    return {name: _noted(value, seen) for name, value in vars(module).items() if name not in _NOT_STATE}


def recall(module: nn.Module, before: dict[str, Any]) -> None:
    """Restore the attributes of `module` to `before`, in the same objects."""
    own = vars(module)
    for name in [name for name in own if name not in before and name not in _NOT_STATE]:
        del own[name]
    done: set[int] = set()
    for name, value in before.items():
        own[name] = _given_back(value, done)


def _noted(value: Any, seen: _Seen) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        found = _Noted(value, value.detach().clone())
    elif isinstance(value, np.ndarray):
        found = _Noted(value, value.copy())
    elif isinstance(value, list | deque | dict | set):
        found = _Noted(value, None)
        seen[id(value)] = found  # registered before its items, which may contain it
        if isinstance(value, dict):
            found.before = {key: _noted(each, seen) for key, each in value.items()}
        else:
            found.before = [_noted(each, seen) for each in value]
    else:
        return value
    seen[id(value)] = found
    return found


def _given_back(noted: Any, done: set[int]) -> Any:
    if not isinstance(noted, _Noted) or id(noted) in done:
        return noted.value if isinstance(noted, _Noted) else noted
    done.add(id(noted))
    value, before = noted.value, noted.before
    if isinstance(value, Tensor):
        if value.shape != before.shape:  # the tensor was resized, so the same object cannot be restored
            return before
        if not _same(value, before):
            value.detach().copy_(before)
    elif isinstance(value, np.ndarray):
        np.copyto(value, before)
    elif isinstance(value, dict):
        content = {key: _given_back(each, done) for key, each in before.items()}
        value.clear()
        value.update(content)
    else:
        content_list = [_given_back(each, done) for each in before]
        value.clear()
        value.update(content_list) if isinstance(value, set) else value.extend(content_list)
    return value


def _same(value: Tensor, before: Tensor) -> bool:
    return value.layout == torch.strided and torch.equal(value, before)
