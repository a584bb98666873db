"""What the ranks match an operation by: its name, its place in a graph, or the order in which they come to it."""

import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf

Naming = Callable[[str, Any], str]  # of what tells a part from the others, and of one of its tensors

_counts: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()  # of names, by graph


def named(kind: str, name: str | None, ignores_scope: bool) -> Naming:
    """Return what names the operations of a call: in a graph by their place in it, eager not at all."""

    def naming(part: str, tensor: Any) -> str:
        if name is not None:
            scope = "" if ignores_scope or tf.executing_eagerly() else _scope()
            return f"{scope}{name}{part}"
        if tf.executing_eagerly():
            return ""
        base = f"{kind}.{re.sub(r'[^a-zA-Z0-9_]', '_', getattr(tensor, 'name', ''))}{part}"
        counts = _counts.setdefault(tf.compat.v1.get_default_graph(), Counter())
        counts[base] += 1
        return f"{base}.{counts[base]}"

    return naming


def _scope() -> str:
    scope: str = tf.compat.v1.get_default_graph().get_name_scope()
    return f"{scope}/" if scope else ""
