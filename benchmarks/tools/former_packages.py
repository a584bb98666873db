"""Let programs of this checkout run on a commit whose internal packages have no leading underscore yet.

Importing this module makes `multiring._runtime` another name of that commit's `multiring.runtime`, and so for every
internal package. It changes nothing for a commit that has `multiring._runtime`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_PREFIX = "multiring._"
_UNCHANGED = ("multiring._native", "multiring.__main__")  # their names always began with an underscore


class _FormerModule(Loader):
    """Imports a module under its former name, and loads it under the current name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the former name."""
        del spec
        found = import_module(self._name)
        self._spec = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import system replaced. The module was executed before."""
        module.__spec__ = self._spec


class _FormerNames(MetaPathFinder):
    """Finds `multiring._NAME` at `multiring.NAME`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module of the former name, or None for other modules."""
        del path, target
        if not fullname.startswith(_PREFIX) or fullname.startswith(_UNCHANGED):
            return None
        return ModuleSpec(fullname, _FormerModule(f"multiring.{fullname.removeprefix(_PREFIX)}"))


def _is_former() -> bool:
    spec = find_spec("multiring")
    return spec is not None and spec.origin is not None and Path(spec.origin).with_name("runtime").is_dir()


if _is_former():
    sys.meta_path.insert(0, _FormerNames())
