"""Make `import horovod` find the package beside this file, also for a program whose own folder has one of that name.

Python runs this at its start, as PYTHONPATH leads here; another sitecustomize that it would have run is run after it.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from os.path import dirname

_HERE = dirname(__file__)  # noqa: PTH120 -- at the start of every Python, pathlib takes longer than all of this


class _Finder:
    """Finds horovod here, before any path is looked at."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_HERE]) if name == "horovod" else None


def _run_the_next() -> None:
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if entry != _HERE])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec  # noqa: PLC0415 -- as above

    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder)
_run_the_next()
