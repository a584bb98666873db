"""Check, when an adapter is imported, that its framework is installed and not too old."""

import importlib
import re

# The oldest versions that work, by module. benchmarks/tools/tensorflow_versions.py tests TensorFlow's.
OLDEST = {"tensorflow": "2.17", "keras": "3.5", "jax": "0.10", "torch": "2.4", "chainer": "7.8", "caffe": "1.0"}
# How to install frameworks that no package index has.
_ELSEWHERE = {"caffe": "its Python folder on PYTHONPATH (docs/caffe.md)"}


def require_framework(module: str, title: str) -> None:
    """Import a framework for the adapter with the same name, and check its version.

    Args:
        module: the framework's module, which is also the name of multiring's extra. A key of OLDEST.
        title: the framework's usual name, for errors.

    Raises:
        ImportError: the framework is not installed or too old. The message says what to install.
    """
    oldest = OLDEST[module]
    by = _ELSEWHERE.get(module, f"pip install 'multiring[{module}]'")
    wanted = f"want {title} {oldest} or newer: {by}"
    try:
        found: str = getattr(importlib.import_module(module), "__version__", oldest)
    except ModuleNotFoundError as error:
        if error.name != module:  # the framework is installed, but lacks a dependency
            raise
        raise ImportError(f"multiring.{module}: {title} is not installed; {wanted}", name=module) from error
    if is_older(found, oldest):
        raise ImportError(f"multiring.{module}: {title} {found} is too old; {wanted}", name=module)


def is_older(version: str, oldest: str) -> bool:
    """Return whether `version` is older than `oldest`; only the first two numbers count."""
    return _numbers(version) < _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])
