"""What an adapter needs of its framework: that it is there, and not too old. Asked when the adapter is imported."""

import importlib
import re

# The oldest versions that work, by module. TensorFlow's: benchmarks/tensorflow_versions.py.
OLDEST = {"tensorflow": "2.17", "keras": "3.5", "jax": "0.10", "torch": "2.4", "chainer": "7.8", "caffe": "1.0"}
# What no index has.
_ELSEWHERE = {"caffe": "its Python folder on PYTHONPATH (docs/caffe.md)"}


def require_framework(module: str, title: str) -> None:
    """Import a framework, for the adapter that goes by its module's name.

    Args:
        module: of the framework; and multiring's extra. One of OLDEST.
        title: as people know it.

    Raises:
        ImportError: it is not installed, or older; says what to install.
    """
    oldest = OLDEST[module]
    by = _ELSEWHERE.get(module, f"pip install 'multiring[{module}]'")
    wanted = f"want {title} {oldest} or newer: {by}"
    try:
        found: str = getattr(importlib.import_module(module), "__version__", oldest)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is there, and lacks something itself
            raise
        raise ImportError(f"multiring.{module}: {title} is not installed; {wanted}", name=module) from error
    if is_older(found, oldest):
        raise ImportError(f"multiring.{module}: {title} {found} is too old; {wanted}", name=module)


def is_older(version: str, oldest: str) -> bool:
    """Return whether a version is older than another, by their first two numbers."""
    return _numbers(version) < _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])
