"""Frameworks that only ranks import, because each import takes seconds."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks every object of a test module for `_mock_name`, and must import nothing
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def framework(name: str) -> Any:
    """Return the module `name`.

    In the process that forks ranks, the module is imported at once. Elsewhere, it is imported on first use.
    """
    if find_spec(name.partition(".")[0]) is None:  # a module below would import those above
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    spec = sys.modules["__main__"].__spec__
    is_nursery = spec is not None and spec.name == "tests.support.nursery"
    return import_module(name) if is_nursery else _Later(name)
