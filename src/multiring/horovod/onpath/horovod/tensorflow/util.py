"""Utility functions that scripts import from Horovod for TensorFlow."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Return whether execution is eager."""
    found: bool = tf.executing_eagerly()
    return found


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """Return `f` as a graph function."""
    return tf.function(f)


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with a cache of results by arguments, separate for eager execution and graphs."""
    known: dict[Any, Any] = {}

    def wrapper(*args: Any) -> Any:
        key = args, _executing_eagerly()
        if key not in known:
            known[key] = f(*args)
        return known[key]

    return wrapper


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 -- Horovod's name
    """Return comparable references to variables.

    The result is a tuple for a list, otherwise one reference.
    """
    if isinstance(vars, list):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables for references from `vars_to_refs`."""
    if isinstance(refs, tuple):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()
