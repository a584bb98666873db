"""Import the modules of a package's names once a name is used.

Launchers and agents need few of multiring's modules, and their start must be short: on several hosts, two Pythons start
one after the other before the ranks do.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from multiring._former_names import refuse


def import_on_first_use(package: str, names: Mapping[str, Sequence[str]], public: Sequence[str] | None = None) -> None:
    """Let a package have names whose modules are imported on the first use of a name.

    The package must also import the names for type checkers, `if TYPE_CHECKING`. The function that finds a name is set
    and not defined in the package, because mypy would accept every name of a package with a `__getattr__`.

    Args:
        package: the package's name; it is being imported.
        names: for each module, the names that the package has from it.
        public: what `dir` lists. Default: all these names.
    """
    module = sys.modules[package]
    places = {name: place for place, found in names.items() for name in found}

    def find(name: str) -> Any:
        if name not in places:
            refuse(package, name)
        found = getattr(importlib.import_module(places[name]), name)
        setattr(module, name, found)
        return found

    listed = sorted(places if public is None else public)
    vars(module).update(__getattr__=find, __dir__=lambda: listed)
