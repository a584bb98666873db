"""Names by which ranks match operations.

The user chooses a name, or in a graph the operation's position determines it.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf

Naming = Callable[[Any], str]  # the call's first tensor -> the name of the call

_counts: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()  # graph -> uses of each name


def named(kind: str, name: str | None, ignores_scope: bool) -> Naming:
    """Return a function that names a call.

    Without `name`, an operation in a graph gets a name from its position. An eager operation gets an empty name, and
    the ranks match it by the order of calls.
    """

    def naming(tensor: Any) -> str:
        if name is not None:
            scope = "" if ignores_scope or tf.executing_eagerly() else _scope()
            return f"{scope}{name}"
        if tf.executing_eagerly():
            return ""
        # A tensor that a graph has captured has a number of the process, which may differ between ranks.
        name_here = re.sub(r"^\d+:\d+$", "captured", getattr(tensor, "name", ""))
        base = f"{kind}.{re.sub(r'[^a-zA-Z0-9_]', '_', name_here)}"
        counts = _counts.setdefault(tf.compat.v1.get_default_graph(), Counter())
        counts[base] += 1
        return f"{base}.{counts[base]}"

    return naming


def _scope() -> str:
    scope: str = tf.compat.v1.get_default_graph().get_name_scope()
    return f"{scope}/" if scope else ""
